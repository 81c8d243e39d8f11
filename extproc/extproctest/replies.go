package extproctest

import (
	"time"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

// Details of a reply that is an error. Any that starts with spurious is a reply without a question.
const (
	spurious          = "spurious_message"
	notStreamed       = spurious + ":_Normal_body_mutation_response_is_received_while_body_mode__is_FULL_DUPLEX_STREAMED"
	streamedUnasked   = spurious + ":_streamed_response_is_received_while_body_mode__is_not_FULL_DUPLEX_STREAMED"
	unhandled         = "unhandled_message"
	invalidHeader     = "header_mutation_set_contains_invalid_character"
	wrongLength       = "mismatch_between_content_length_and_the_length_of_the_mutated_body"
	immediateDisabled = "unhandled_immediate_response_due_to_config_disabled_it"
)

// reply takes a message from the server.
func (x *exchange) reply(r *extprocpb.ProcessingResponse) {
	x.read++
	quirks := &x.envoy.Quirks
	if x.answered {
		x.errorf("a message follows the ImmediateResponse: %v", r)
		if quirks.HangUp != Ignore {
			return
		}
	}
	x.answered = x.answered || r.GetImmediateResponse() != nil && r.OverrideMessageTimeout == nil
	switch {
	case x.closed || x.cfg.ObservabilityMode:
		return
	case r.OverrideMessageTimeout != nil:
		x.extend(r)
		return
	case r.GetImmediateResponse() != nil && quirks.HangUp == Ignore:
		return
	}

	x.metadata(r)
	var details string
	switch m := r.Response.(type) {
	case *extprocpb.ProcessingResponse_RequestHeaders:
		details = x.request.onHeaders(m.RequestHeaders, r.ModeOverride)
	case *extprocpb.ProcessingResponse_RequestBody:
		details = x.request.onBody(m.RequestBody)
	case *extprocpb.ProcessingResponse_RequestTrailers:
		details = x.request.onTrailers(m.RequestTrailers)
	case *extprocpb.ProcessingResponse_ResponseHeaders:
		details = x.response.onHeaders(m.ResponseHeaders, r.ModeOverride)
	case *extprocpb.ProcessingResponse_ResponseBody:
		details = x.response.onBody(m.ResponseBody)
	case *extprocpb.ProcessingResponse_ResponseTrailers:
		details = x.response.onTrailers(m.ResponseTrailers)
	case *extprocpb.ProcessingResponse_ImmediateResponse:
		details = x.immediate(m.ImmediateResponse)
	default:
		details = unhandled
	}

	switch {
	case details == spurious && r.GetResponseTrailers() != nil && x.response.mode.body == duplex:
		// Measured on 1.37 to 1.40: no error, the stream is closed, and what follows passes.
		x.errorf("%s: %v", details, r)
		x.letGo()
		x.hangUp(Reset, 0)
	case details != "":
		x.errorf("%s: %v", details, r)
		x.fail(x.errorStatus(), details, Reset)
	case !x.closed && (x.response.finished || !x.request.expects() && !x.response.expects()):
		// No phase needs the server any more: Envoy closes the stream, since 1.37, and the request runs on.
		how := quirks.HangUp
		if how != HalfClose && how != HalfCloseThenReset {
			how = Reset
		}
		x.hangUp(how, 0)
	}
}

// stalled reports whether Quirks.StopReading is reached.
func (x *exchange) stalled() bool {
	n := x.envoy.Quirks.StopReading
	return n > 0 && x.read >= n
}

func (x *exchange) immediate(r *extprocpb.ImmediateResponse) (details string) {
	if x.cfg.DisableImmediateResponse {
		return immediateDisabled
	}
	code := int(r.GetStatus().GetCode())
	if code < 200 {
		x.errorf("the ImmediateResponse's status of %d becomes 200", code)
		code = 200
	}
	x.localReply(code, r.GetHeaders(), r.GetBody(), underscores(r.GetDetails()))
	x.hangUp(x.envoy.Quirks.HangUp, x.delay)
	return ""
}

// extend gives the server more time. All else in such a message is ignored, even an ImmediateResponse.
func (x *exchange) extend(r *extprocpb.ProcessingResponse) {
	if r.Response != nil {
		x.errorf("override_message_timeout hides the rest of the message: %v", r)
	}
	d := r.OverrideMessageTimeout.AsDuration()
	for _, s := range x.sides() {
		if s.timer != nil && !s.extended && d >= time.Millisecond && d <= x.cfg.GetMaxMessageTimeout().AsDuration() {
			s.extended = true
			s.startTimer(d)
			return
		}
	}
	x.errorf("override_message_timeout without effect: %v", r)
}

// override changes the modes of what follows a side's headers.
func (x *exchange) override(s *side, pm *filterpb.ProcessingMode) {
	if !x.cfg.AllowModeOverride || x.request.mode.body == duplex || x.response.mode.body == duplex {
		x.errorf("mode_override without effect: %v", pm)
		return
	}
	if !s.response {
		x.request.mode = requestMode(pm, x.cfg.GetProcessingMode())
	}
	x.response.mode = responseMode(pm, x.cfg.GetProcessingMode())
}

// metadata records the dynamic metadata that the configuration lets in.
func (x *exchange) metadata(r *extprocpb.ProcessingResponse) {
	for _, ns := range x.cfg.GetMetadataOptions().GetReceivingNamespaces().GetUntyped() {
		m := r.GetDynamicMetadata().GetFields()[ns].GetStructValue()
		if m == nil {
			continue
		}
		if x.entry.Metadata == nil {
			x.entry.Metadata = make(map[string]*structpb.Struct)
		}
		if x.entry.Metadata[ns] == nil {
			x.entry.Metadata[ns] = new(structpb.Struct)
		}
		proto.Merge(x.entry.Metadata[ns], m)
	}
}
