package extproc

import (
	"strings"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/extevict/extevict/abort"
)

// books is what the messages in both directions say about the response, as far as
// the answer to an abort depends on it. Guarded by Stream.mu.
type books struct {
	mode     filterpb.ProcessingMode_BodySendMode // of the response body
	doubt    bool                                 // a mode_override may have changed mode, or not
	grpc     bool                                 // a gRPC request
	sse      bool                                 // an event stream that an event can be added to
	body     bool                                 // a part of the body was received
	released bool                                 // response headers are on their way to the client
	tail     tail                                 // of what was forwarded
}

// requestLocked books a message from the proxy. The Owner's lock nests inside
// Stream.mu.
func (s *Stream) requestLocked(req *extprocpb.ProcessingRequest) {
	b := &s.books
	if c := req.GetProtocolConfig(); c != nil { // the first message
		b.mode = c.GetResponseBodyMode()
	}
	switch r := req.GetRequest().(type) {
	case *extprocpb.ProcessingRequest_RequestHeaders:
		b.grpc = strings.HasPrefix(header(r.RequestHeaders, "content-type"), "application/grpc")
	case *extprocpb.ProcessingRequest_ResponseHeaders:
		h := r.ResponseHeaders
		b.sse = eventStream(header(h, "content-type")) && header(h, "content-length") == "" && header(h, "content-encoding") == ""
		s.own.Advance(abort.Held)
	case *extprocpb.ProcessingRequest_ResponseBody:
		b.body = true
		s.own.Count(1, len(r.ResponseBody.GetBody()))
	}
}

// replyLocked books a reply before it is sent. It reports false if the request has been
// aborted: then the reply must not be sent.
func (s *Stream) replyLocked(resp *extprocpb.ProcessingResponse) bool {
	b := &s.books
	if o := resp.GetModeOverride(); o != nil && o.GetResponseBodyMode() != b.mode {
		// Whether Envoy honours it (allow_mode_override) nobody tells.
		b.mode, b.doubt = o.GetResponseBodyMode(), true
	}
	switch r := resp.GetResponse().(type) {
	case *extprocpb.ProcessingResponse_RequestHeaders, *extprocpb.ProcessingResponse_RequestBody, *extprocpb.ProcessingResponse_RequestTrailers:
		if b.mode == filterpb.ProcessingMode_NONE || b.doubt {
			return s.own.Advance(abort.Unknown) // response headers may be skipped too
		}
	case *extprocpb.ProcessingResponse_ResponseHeaders:
		b.headersReply(r.ResponseHeaders.GetResponse().GetHeaderMutation())
		if !b.doubt && (b.mode == filterpb.ProcessingMode_BUFFERED || b.mode == filterpb.ProcessingMode_BUFFERED_PARTIAL) {
			return true // the headers wait for the body
		}
		return s.releaseLocked()
	case *extprocpb.ProcessingResponse_ResponseBody:
		b.tail = b.tail.after(r.ResponseBody.GetResponse().GetBodyMutation().GetStreamedResponse().GetBody())
		return s.releaseLocked()
	case *extprocpb.ProcessingResponse_ResponseTrailers:
		return s.releaseLocked()
	}
	return true
}

// releaseLocked books that response headers go to the client with this reply.
func (s *Stream) releaseLocked() bool {
	if !s.books.released {
		s.books.released = s.own.Advance(abort.Streaming)
		return s.books.released
	}
	return true
}

// headersReply books what the server makes of the response headers. It is judged by
// names alone, and in doubt there is no event.
func (b *books) headersReply(m *extprocpb.HeaderMutation) {
	for _, o := range m.GetSetHeaders() {
		switch strings.ToLower(o.GetHeader().GetKey()) {
		case "content-type":
			b.sse = b.sse && eventStream(value(o.GetHeader().GetRawValue(), o.GetHeader().GetValue()))
		case "content-length", "content-encoding":
			b.sse = false
		}
	}
	for _, name := range m.GetRemoveHeaders() {
		if strings.EqualFold(name, "content-type") {
			b.sse = false
		}
	}
}

// eventAllowed reports whether an error event can be sent unasked: Envoy would take
// it for a spurious message before the first part of the body was received.
func (b *books) eventAllowed() bool {
	return b.mode == filterpb.ProcessingMode_FULL_DUPLEX_STREAMED && !b.doubt &&
		b.sse && !b.grpc && b.body && b.released && b.tail.endsEvent()
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
