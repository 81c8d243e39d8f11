package extproc

import (
	"errors"
	"fmt"
	"strings"
	"sync/atomic"
	"time"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"

	"github.com/extevict/extevict/abort"
)

// Response is the answer to an abort unless [WithResponse] says otherwise: 429 with
// an OpenAI error object, which clients retry after the Retry-After header's second;
// the reason is in the header x-evicted-reason and, as "evicted_preempted", in
// Envoy's %RESPONSE_CODE_DETAILS%.
func Response(e *abort.Error, _ []abort.Request) *extprocpb.ImmediateResponse {
	reason := e.Reason.String()
	return &extprocpb.ImmediateResponse{
		Status: &typepb.HttpStatus{Code: typepb.StatusCode_TooManyRequests},
		Headers: &extprocpb.HeaderMutation{SetHeaders: []*corepb.HeaderValueOption{
			setHeader("content-type", "application/json"),
			setHeader("retry-after", "1"),
			setHeader("x-evicted-reason", reason),
		}},
		Body:    errorObject(reason),
		Details: details(reason),
	}
}

// details is not empty and has no spaces, which Envoy would replace.
func details(reason string) string { return "evicted_" + reason }

// errorObject is an error as the OpenAI API puts it. A reason is plain ASCII.
func errorObject(reason string) []byte {
	return fmt.Appendf(nil, `{"error":{"message":"The request was evicted: %s. Please retry.","type":"rate_limit_error","param":null,"code":"request_evicted"}}`, reason)
}

func errorEvent(e *abort.Error, _ []abort.Request) []byte {
	return fmt.Appendf(nil, "data: %s\n\n", errorObject(e.Reason.String()))
}

// setHeader uses raw_value since Envoy sends an empty value for the other field.
func setHeader(name, value string) *corepb.HeaderValueOption {
	return &corepb.HeaderValueOption{
		Header:       &corepb.HeaderValue{Key: name, RawValue: []byte(value)},
		AppendAction: corepb.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
	}
}

// answer tells the proxy that the request was aborted, and sees it hang up. It is a
// goroutine of its own, one for each aborted request, started by the settling of it.
//
// It sends from its first frame, and a small one: grpc's Send just fits a new
// goroutine's stack, and the client would wait for it to grow (12 of 52 us, measured).
func (s *Stream) answer() {
	p := s.prepare()
	defer s.conclude(p)
	for len(p.msgs) > 0 && p.failed == nil {
		p.failed = s.processServer.Send(p.msgs[0])
		p.msgs = p.msgs[1:]
	}
}

// prepared is an answer on its way.
type prepared struct {
	msgs     []*extprocpb.ProcessingResponse
	kind     Answer // what they are
	failed   error  // of a Send
	err      error  // why it is not what it should be
	turn     bool   // to send is ours; else there are no messages
	draining bool   // drain is at work already
}

// prepare chooses the answer and takes the turn to send, so that nothing of what it was
// chosen by can move.
func (s *Stream) prepare() *prepared {
	s.bench.wake() // an aborted request's server waits for no turn
	h := s.own.Handle()
	cause, reqs := h.Err().(*abort.Error), h.Requests()
	p := &prepared{}
	var imm *extprocpb.ImmediateResponse
	imm, p.err = s.response(cause, reqs)
	var event []byte
	if s.facts.has(isSSE | released) {
		event = s.event(cause, reqs)
	}
	if !s.bench.take(&s.sending, s.ended.Load) {
		p.err = errors.Join(p.err, errTooLate)
		return p
	}
	if len(event) > 0 && s.opts.event.Wait > 0 && s.facts.mode() == filterpb.ProcessingMode_STREAMED && s.eventAllowed() && s.owed.empty() {
		p.draining = true
		go s.drain() // instead of in conclude
		s.awaitChunk(s.opts.event.Wait)
	}
	p.turn = true
	if s.ended.Load() {
		p.err = errors.Join(p.err, errTooLate)
		return p
	}
	p.msgs, p.kind = s.messages(imm, event, cause)
	return p
}

// conclude is what comes after the client has its answer, or a decorator's Send has
// panicked.
func (s *Stream) conclude(p *prepared) {
	if r := recover(); r != nil {
		p.failed = status.Errorf(codes.Internal, "extproc: Send panicked: %v", r)
	}
	if p.failed != nil {
		p.kind, p.err = AnswerNone, errors.Join(p.err, p.failed)
	}
	if p.turn {
		s.bench.give(&s.sending)
	}
	close(s.answerDone())
	s.reportAnswered(p.kind, p.err)
	if !p.draining {
		s.drain()
	}
}

var errTooLate = errors.New("extproc: the stream ended before the answer")

// awaitChunk waits for a chunk whose reply can carry the event: the first message that
// crosses the abort will do, or has to. The caller has the turn to send.
func (s *Stream) awaitChunk(wait time.Duration) {
	var expired atomic.Bool
	t := time.AfterFunc(wait, func() { expired.Store(true); s.bench.wake() })
	defer t.Stop()
	s.bench.mu.Lock()
	defer s.bench.mu.Unlock()
	for !expired.Load() && !s.late.Load() && !s.gone.Load() && !s.ended.Load() {
		s.bench.cond.Wait()
	}
}

// drain receives in place of a server that doesn't, until the proxy hangs up: it is
// answer's last act, or a goroutine beside it, and ends with the stream.
func (s *Stream) drain() {
	if !s.bench.take(&s.receiving, s.gone.Load) {
		return // the server's own Recv has seen it
	}
	defer s.bench.give(&s.receiving)
	if s.msgs != nil {
		for req := range s.msgs {
			s.crossed(req)
		}
		s.recvErr = s.readErr
	}
	for s.recvErr == nil {
		var req *extprocpb.ProcessingRequest
		if req, s.recvErr = s.recvProtected(); s.recvErr == nil {
			s.crossed(req)
		}
	}
	s.letGo(s.recvErr)
}

// messages chooses the answer by where the response is now. The caller has the turn
// to send, so nothing of it can move.
func (s *Stream) messages(imm *extprocpb.ImmediateResponse, event []byte, cause *abort.Error) ([]*extprocpb.ProcessingResponse, Answer) {
	final := &extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_ImmediateResponse{ImmediateResponse: imm}}
	f := &s.facts
	if len(event) > 0 && s.eventAllowed() {
		switch {
		// Envoy would take it for a spurious message before the first part of the body was received.
		case f.mode() == filterpb.ProcessingMode_FULL_DUPLEX_STREAMED && f.has(hasBody):
			if s.opts.event.CleanEnd {
				return []*extprocpb.ProcessingResponse{cleanEnd(event, cause)}, AnswerEnd
			}
			m := &extprocpb.BodyMutation{Mutation: &extprocpb.BodyMutation_StreamedResponse{StreamedResponse: &extprocpb.StreamedBodyResponse{Body: event}}}
			return []*extprocpb.ProcessingResponse{bodyReply(m), final}, AnswerEvent
		// In place of the chunk: the server has not said yet that the client may have it.
		case f.mode() == filterpb.ProcessingMode_STREAMED && !s.owed.empty():
			m := &extprocpb.BodyMutation{Mutation: &extprocpb.BodyMutation_Body{Body: event}}
			return []*extprocpb.ProcessingResponse{bodyReply(m), final}, AnswerEvent
		}
	}
	switch {
	case f.has(released):
		return []*extprocpb.ProcessingResponse{final}, AnswerReset
	case s.own.Handle().Progress().Phase == abort.Unknown:
		return []*extprocpb.ProcessingResponse{final}, AnswerUnknown
	}
	return []*extprocpb.ProcessingResponse{final}, AnswerStatus
}

func bodyReply(m *extprocpb.BodyMutation) *extprocpb.ProcessingResponse {
	return &extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_ResponseBody{ResponseBody: &extprocpb.BodyResponse{
		Response: &extprocpb.CommonResponse{BodyMutation: m}}}}
}

// cleanEnd ends the client's stream with the event. Nothing in Envoy's access log
// tells that from a normal end, so it leaves dynamic metadata there.
func cleanEnd(event []byte, cause *abort.Error) *extprocpb.ProcessingResponse {
	r := bodyReply(&extprocpb.BodyMutation{Mutation: &extprocpb.BodyMutation_StreamedResponse{
		StreamedResponse: &extprocpb.StreamedBodyResponse{Body: event, EndOfStream: true}}})
	r.DynamicMetadata = &structpb.Struct{Fields: map[string]*structpb.Value{
		MetadataNamespace: structpb.NewStructValue(&structpb.Struct{Fields: map[string]*structpb.Value{
			"evicted": structpb.NewStringValue(cause.Reason.String())}})}}
	return r
}

// response returns what to answer, and why that is not what WithResponse's function made.
func (s *Stream) response(e *abort.Error, reqs []abort.Request) (imm *extprocpb.ImmediateResponse, err error) {
	if s.opts.response != nil {
		if imm, err = s.customResponse(e, reqs); err == nil {
			return imm, nil
		}
	}
	if imm = usual[e.Reason]; imm == nil {
		imm = Response(e, reqs)
	}
	return complete(imm, e, s.facts.has(isGRPC)), err
}

// usual is the default answers for the module's own reasons: to make one takes as long
// as half a Send. Nobody changes them.
var usual = func() map[abort.Reason]*extprocpb.ImmediateResponse {
	m := map[abort.Reason]*extprocpb.ImmediateResponse{}
	for _, r := range []abort.Reason{abort.Preempted, abort.Overloaded, abort.Draining, abort.Canceled} {
		m[r] = Response(&abort.Error{Reason: r}, nil)
	}
	return m
}()

func (s *Stream) customResponse(e *abort.Error, reqs []abort.Request) (imm *extprocpb.ImmediateResponse, err error) {
	defer recovered("WithResponse's function", &err)
	if imm = s.opts.response(e, reqs); imm == nil {
		return nil, errors.New("extproc: WithResponse's function returned nil")
	}
	imm = complete(imm, e, s.facts.has(isGRPC))
	if err := check(imm, s.facts.has(isGRPC)); err != nil {
		return nil, fmt.Errorf("extproc: the response to an abort: %w", err)
	}
	return imm, nil
}

func (s *Stream) event(e *abort.Error, reqs []abort.Request) (p []byte) {
	var err error
	defer recovered("ErrorEvent's function", &err)
	return s.opts.event.Event(e, reqs)
}

// complete fills in what an answer must not lack, in a copy: it may be the user's.
func complete(imm *extprocpb.ImmediateResponse, e *abort.Error, forGRPC bool) *extprocpb.ImmediateResponse {
	needStatus := forGRPC && imm.GrpcStatus == nil
	if imm.Details != "" && !needStatus {
		return imm
	}
	imm = proto.CloneOf(imm)
	if imm.Details == "" {
		imm.Details = details(e.Reason.String())
	}
	if needStatus {
		imm.GrpcStatus = &extprocpb.GrpcStatus{Status: uint32(codes.ResourceExhausted)}
	}
	return imm
}

// check reports what Envoy was seen to make something else of than was meant.
func check(imm *extprocpb.ImmediateResponse, forGRPC bool) error {
	if c := imm.GetStatus().GetCode(); c < 400 || c > 599 {
		return fmt.Errorf("status %d is outside 400..599", c)
	}
	if forGRPC && imm.GetGrpcStatus().GetStatus() == 0 {
		return errors.New("grpc_status 0 is a success")
	}
	for _, o := range imm.GetHeaders().GetSetHeaders() {
		if err := checkHeader(o.GetHeader()); err != nil {
			return err
		}
	}
	// grpc would end the stream with an error of its own, which is a 500 or, where the
	// filter fails open, nothing at all.
	_, err := proto.Marshal(imm)
	return err
}

func checkHeader(h *corepb.HeaderValue) error {
	name := strings.ToLower(h.GetKey())
	switch {
	case name == "" || strings.ContainsFunc(name, func(r rune) bool { return !tokenRune(r) }):
		return fmt.Errorf("invalid header name %q", h.GetKey())
	case name == "host" || name == "content-length" || strings.HasPrefix(name, "x-envoy-"):
		return fmt.Errorf("header %s is not for an answer to set", name)
	case h.GetValue() != "" && len(h.GetRawValue()) == 0:
		return fmt.Errorf("header %s has a value where Envoy reads raw_value", name)
	}
	for _, c := range h.GetRawValue() {
		if c < ' ' && c != '\t' || c == 0x7f {
			return fmt.Errorf("invalid value of header %s: %q", name, h.GetRawValue())
		}
	}
	return nil
}

// tokenRune reports whether r can be part of a header's name (RFC 9110, 5.6.2). A
// colon can't, so that no pseudo-header passes.
func tokenRune(r rune) bool {
	return 'a' <= r && r <= 'z' || '0' <= r && r <= '9' || strings.ContainsRune("!#$%&'*+-.^_`|~", r)
}
