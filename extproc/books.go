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
	modeMask  = 0xf // the response's body mode
	modeShift = 4   // to the request's
)

const (
	inDoubt    uint32 = 1 << (8 + iota) // a mode_override may have changed the mode, or not
	isGRPC                              // the request is gRPC
	isSSE                               // the response is an event stream that an event can be added to
	hasHeader                           // the response's headers were received
	hasBody                             // a part of the response's body was received
	configured                          // the first message said what the body modes are
	released                            // response headers are on their way to the client
	ownEnd                              // the server has ended the request by itself
	letOn                               // the server has answered the request's headers
	asked                               // WithKeepalive has asked for response trailers
	observing                           // Envoy does not listen
)

type bodyMode = filterpb.ProcessingMode_BodySendMode

func (f *facts) mode() bodyMode        { return bodyMode(f.word.Load() & modeMask) }
func (f *facts) requestMode() bodyMode { return bodyMode(f.word.Load() >> modeShift & modeMask) }

// has reports whether all the bits are set.
func (f *facts) has(bits uint32) bool { return f.word.Load()&bits == bits }

func (f *facts) set(bits uint32) {
	if !f.has(bits) { // most messages change nothing
		f.word.Or(bits)
	}
}

func (f *facts) clear(bits uint32) { f.word.And(^bits) }

func (f *facts) setMode(m bodyMode) {
	for {
		old := f.word.Load()
		if f.word.CompareAndSwap(old, old&^modeMask|uint32(m)&modeMask) {
			return
		}
	}
}

// book books a message from the proxy. The caller has the turn to receive.
func (s *Stream) book(req *extprocpb.ProcessingRequest) {
	if s.isAborted() {
		s.crossed(req)
	} else {
		s.received(req)
	}
}

// received books a message from the proxy, and settles the request first if it is the
// end of the response: an abort that came between the two would be answered as if there
// were more to come.
func (s *Stream) received(req *extprocpb.ProcessingRequest) {
	if req.GetObservabilityMode() {
		s.facts.set(observing)
		s.own.Settle(abort.Closed)
	} else if endsResponse(req) && !s.own.Settle(abort.Completed) && s.isAborted() {
		s.crossed(req) // the abort has come since the caller looked
		return
	}
	if c := req.GetProtocolConfig(); c != nil { // the first message
		s.facts.setMode(c.GetResponseBodyMode())
		if c.GetResponseBodyMode() == filterpb.ProcessingMode_NONE {
			s.own.Unseen() // unless a mode_override is honoured: then chunks come
		}
		s.facts.set(uint32(c.GetRequestBodyMode())&modeMask<<modeShift | configured)
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
		s.facts.set(hasHeader)

		s.own.Advance(abort.Held)
	case *extprocpb.ProcessingRequest_ResponseBody:
		s.facts.set(hasBody)
		if !s.facts.has(hasHeader) {
			s.release() // with response_header_mode SKIP nobody holds them
		}
		s.owe(r.ResponseBody.GetBody())
		s.own.Count(1, len(r.ResponseBody.GetBody()))
	}
}

// crossed books a message that crossed the abort: a chunk is a reply owed, which can
// carry an error event.
func (s *Stream) crossed(req *extprocpb.ProcessingRequest) {
	if r := req.GetResponseBody(); r != nil && !r.GetEndOfStream() {
		s.owe(r.GetBody()) // an event in the reply to the last chunk would be a clean end
	}
	s.late.Store(true)
	s.bench.wake()
}

// owe books a chunk as owed a reply, where that matters.
func (s *Stream) owe(chunk []byte) {
	if s.facts.mode() == filterpb.ProcessingMode_STREAMED && s.facts.has(isSSE) {
		s.owed.push(chunk)
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
		f.set(letOn)
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
		s.forward(r.ResponseBody.GetResponse().GetBodyMutation())
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

// forward books what of the body goes to the client with a reply.
func (s *Stream) forward(m *extprocpb.BodyMutation) {
	if s.facts.mode() != filterpb.ProcessingMode_STREAMED {
		s.tail = s.tail.after(m.GetStreamedResponse().GetBody())
		return
	}
	if !s.facts.has(isSSE) {
		return
	}
	chunk := s.owed.pop()
	switch m := m.GetMutation().(type) {
	case *extprocpb.BodyMutation_Body:
		s.tail = s.tail.after(m.Body)
	case *extprocpb.BodyMutation_ClearBody:
		if !m.ClearBody {
			s.tail = s.tail.afterChunk(chunk)
		}
	default:
		s.tail = s.tail.afterChunk(chunk)
	}
}

// eventAllowed reports whether an error event can be sent at all; where is another
// matter. The caller has the turn to send.
func (s *Stream) eventAllowed() bool {
	return s.facts.has(isSSE|released) && !s.facts.has(inDoubt) && !s.facts.has(isGRPC) && s.tail.endsEvent()
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
