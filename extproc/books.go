package extproc

import (
	"strings"
	"sync/atomic"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/extevict/extevict/abort"
)

// facts is what the messages in both directions say about the response, as far as
// the answer to an abort depends on it: a body mode and some bits. Both sides of the
// stream change it, each rarely.
type facts struct{ word atomic.Uint32 }

const (
	modeMask uint32 = 0xff // the response's body mode

	inDoubt  uint32 = 1 << (8 + iota) // a mode_override may have changed the mode, or not
	isGRPC                            // the request is gRPC
	isSSE                             // the response is an event stream that an event can be added to
	hasBody                           // a part of the response's body was received
	released                          // response headers are on their way to the client
)

func (f *facts) mode() filterpb.ProcessingMode_BodySendMode {
	return filterpb.ProcessingMode_BodySendMode(f.word.Load() & modeMask)
}

// has reports whether all the bits are set.
func (f *facts) has(bits uint32) bool { return f.word.Load()&bits == bits }

func (f *facts) set(bits uint32) {
	if !f.has(bits) { // most messages change nothing
		f.word.Or(bits)
	}
}

func (f *facts) clear(bits uint32) { f.word.And(^bits) }

func (f *facts) setMode(m filterpb.ProcessingMode_BodySendMode) {
	for {
		old := f.word.Load()
		if f.word.CompareAndSwap(old, old&^modeMask|uint32(m)&modeMask) {
			return
		}
	}
}

// received books a message from the proxy, and settles the request first if it is the
// end of the response: an abort that came between the two would be answered as if there
// were more to come. The caller has the turn to receive.
func (s *Stream) received(req *extprocpb.ProcessingRequest) {
	if req.GetObservabilityMode() {
		s.own.Settle(abort.Closed) // Envoy does not listen
	} else if endsResponse(req) {
		s.own.Settle(abort.Completed)
	}
	if c := req.GetProtocolConfig(); c != nil { // the first message
		s.facts.setMode(c.GetResponseBodyMode())
	}
	switch r := req.GetRequest().(type) {
	case *extprocpb.ProcessingRequest_RequestHeaders:
		if strings.HasPrefix(header(r.RequestHeaders, "content-type"), "application/grpc") {
			s.facts.set(isGRPC)
		}
	case *extprocpb.ProcessingRequest_ResponseHeaders:
		h := r.ResponseHeaders
		if eventStream(header(h, "content-type")) && header(h, "content-length") == "" && header(h, "content-encoding") == "" {
			s.facts.set(isSSE)
		}
		s.own.Advance(abort.Held)
	case *extprocpb.ProcessingRequest_ResponseBody:
		s.facts.set(hasBody)
		s.own.Count(1, len(r.ResponseBody.GetBody()))
	}
}

// reply books a reply before it is sent. It reports false if the request has been
// aborted: then the reply must not be sent. The caller has the turn to send.
func (s *Stream) reply(resp *extprocpb.ProcessingResponse) bool {
	f := &s.facts
	if o := resp.GetModeOverride(); o != nil && o.GetResponseBodyMode() != f.mode() {
		// Whether Envoy honours it (allow_mode_override) nobody tells.
		f.setMode(o.GetResponseBodyMode())
		f.set(inDoubt)
	}
	switch r := resp.GetResponse().(type) {
	case *extprocpb.ProcessingResponse_RequestHeaders, *extprocpb.ProcessingResponse_RequestBody, *extprocpb.ProcessingResponse_RequestTrailers:
		if f.mode() == filterpb.ProcessingMode_NONE || f.has(inDoubt) {
			return s.own.Advance(abort.Unknown) // response headers may be skipped too
		}
	case *extprocpb.ProcessingResponse_ResponseHeaders:
		if !keepsEventStream(r.ResponseHeaders.GetResponse().GetHeaderMutation()) {
			f.clear(isSSE)
		}
		if m := f.mode(); !f.has(inDoubt) && (m == filterpb.ProcessingMode_BUFFERED || m == filterpb.ProcessingMode_BUFFERED_PARTIAL) {
			return true // the headers wait for the body
		}
		return s.release()
	case *extprocpb.ProcessingResponse_ResponseBody:
		s.tail = s.tail.after(r.ResponseBody.GetResponse().GetBodyMutation().GetStreamedResponse().GetBody())
		return s.release()
	case *extprocpb.ProcessingResponse_ResponseTrailers:
		return s.release()
	}
	return true
}

// release books that response headers go to the client with this reply.
func (s *Stream) release() bool {
	if s.facts.has(released) {
		return true
	}
	if !s.own.Advance(abort.Streaming) {
		return false
	}
	s.facts.set(released)
	return true
}

// eventAllowed reports whether an error event can be sent unasked: Envoy would take
// it for a spurious message before the first part of the body was received. The
// caller has the turn to send.
func (s *Stream) eventAllowed() bool {
	f := &s.facts
	return f.mode() == filterpb.ProcessingMode_FULL_DUPLEX_STREAMED && !f.has(inDoubt) &&
		f.has(isSSE|hasBody|released) && !f.has(isGRPC) && s.tail.endsEvent()
}

// keepsEventStream reports whether an event stream is still one after the server's
// changes to the response's headers. It is judged by their names; in doubt it is not.
func keepsEventStream(m *extprocpb.HeaderMutation) bool {
	for _, o := range m.GetSetHeaders() {
		switch strings.ToLower(o.GetHeader().GetKey()) {
		case "content-type":
			if !eventStream(value(o.GetHeader().GetRawValue(), o.GetHeader().GetValue())) {
				return false
			}
		case "content-length", "content-encoding":
			return false
		}
	}
	for _, name := range m.GetRemoveHeaders() {
		if strings.EqualFold(name, "content-type") {
			return false
		}
	}
	return true
}

// tail is the last four bytes of a body, the latest in the lowest byte, with a bit
// above them once there are any.
type tail uint64

func (t tail) after(p []byte) tail {
	for _, c := range p[max(0, len(p)-4):] {
		t = (t<<8|tail(c))&0xffffffff | 1<<32
	}
	return t
}

// endsEvent reports whether an event may follow: nothing was sent, or an empty line
// was, in one of the spellings that the parsers of SSE clients split at.
func (t tail) endsEvent() bool {
	const lflf, crcr, crlfcrlf = '\n'<<8 | '\n', '\r'<<8 | '\r', '\r'<<24 | '\n'<<16 | '\r'<<8 | '\n'
	return t == 0 || t&0xffff == lflf || t&0xffff == crcr || t&0xffffffff == crlfcrlf
}

// endsResponse reports whether req is the last that the upstream's response causes.
func endsResponse(req *extprocpb.ProcessingRequest) bool {
	switch r := req.GetRequest().(type) {
	case *extprocpb.ProcessingRequest_ResponseHeaders:
		return r.ResponseHeaders.GetEndOfStream()
	case *extprocpb.ProcessingRequest_ResponseBody:
		return r.ResponseBody.GetEndOfStream()
	case *extprocpb.ProcessingRequest_ResponseTrailers:
		return true
	}
	return false
}

// endsRequest reports whether the server ends the request by itself with resp: its
// own answer to the client, or an end of the response's body.
func endsRequest(resp *extprocpb.ProcessingResponse) bool {
	switch r := resp.GetResponse().(type) {
	case *extprocpb.ProcessingResponse_ImmediateResponse, *extprocpb.ProcessingResponse_StreamedImmediateResponse:
		return true
	case *extprocpb.ProcessingResponse_ResponseBody:
		b := r.ResponseBody.GetResponse().GetBodyMutation().GetStreamedResponse()
		return b.GetEndOfStream() || b.GetEndOfStreamWithoutMessage()
	}
	return false
}

func eventStream(contentType string) bool {
	t, _, _ := strings.Cut(contentType, ";")
	return strings.EqualFold(strings.TrimSpace(t), "text/event-stream")
}

// header returns the value of the first header called name, which is in lower case as
// Envoy's are, or "".
func header(h *extprocpb.HttpHeaders, name string) string {
	for _, v := range h.GetHeaders().GetHeaders() {
		if v.GetKey() == name {
			return value(v.GetRawValue(), v.GetValue())
		}
	}
	return ""
}

// value is a header's value: Envoy fills in raw_value, other proxies value.
func value(raw []byte, v string) string {
	if len(raw) > 0 {
		return string(raw)
	}
	return v
}
