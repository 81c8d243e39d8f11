package extproctest

import (
	"bytes"
	"io"
	"net/http"
	"time"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

const (
	none     = filterpb.ProcessingMode_NONE
	streamed = filterpb.ProcessingMode_STREAMED
	buffered = filterpb.ProcessingMode_BUFFERED
	partial  = filterpb.ProcessingMode_BUFFERED_PARTIAL
	duplex   = filterpb.ProcessingMode_FULL_DUPLEX_STREAMED
)

// A mode is one side's half of a ProcessingMode.
type mode struct {
	headers, trailers bool
	body              filterpb.ProcessingMode_BodySendMode
}

// requestMode and responseMode read one half of pm. If pm is an override, a header or trailer mode of DEFAULT means the
// configured one; body modes are always replaced (measured on 1.40).
func requestMode(pm, configured *filterpb.ProcessingMode) mode {
	return modeOf(pm.GetRequestHeaderMode(), configured.GetRequestHeaderMode(),
		pm.GetRequestTrailerMode(), configured.GetRequestTrailerMode(), pm.GetRequestBodyMode())
}

func responseMode(pm, configured *filterpb.ProcessingMode) mode {
	return modeOf(pm.GetResponseHeaderMode(), configured.GetResponseHeaderMode(),
		pm.GetResponseTrailerMode(), configured.GetResponseTrailerMode(), pm.GetResponseBodyMode())
}

func modeOf(h, defH, t, defT filterpb.ProcessingMode_HeaderSendMode, b filterpb.ProcessingMode_BodySendMode) mode {
	if h == filterpb.ProcessingMode_DEFAULT {
		h = defH
	}
	if t == filterpb.ProcessingMode_DEFAULT {
		t = defT
	}
	return mode{headers: h != filterpb.ProcessingMode_SKIP, trailers: t == filterpb.ProcessingMode_SEND, body: b}
}

// part is a part of an HTTP message.
type part int

const (
	headersPart part = iota
	bodyPart
	trailersPart
)

// owed is a message that the server has not answered.
type owed struct {
	part part
	data []byte // of a body message, to be forwarded if the answer does not replace it
	end  bool
}

// A side is the filter's state for one direction, the request's or the response's: what has come from its source, what the
// server is asked about, what has gone on to the sink. It belongs to the exchange's goroutine.
type side struct {
	x        *exchange
	response bool
	mode     mode
	src      chan chunk
	out      *sink

	head     fields // nil: not here yet
	noBody   bool
	held     []byte // not yet sent or forwarded
	ended    bool   // the source has ended
	trailers fields // then, if there are any

	owed         []owed
	owedBytes    int
	queuedBytes  int  // in FULL_DUPLEX_STREAMED: in the exchange's queue; from then on they are the server's
	bodySent     bool // a body message has gone to the server
	endSent      bool // its end, too
	whole        bool // the body was sent as a whole
	trailersSent bool
	raw          bool // the rest of the body passes by the server
	released     bool // the headers have gone on
	finished     bool // the end has gone on

	timer    *time.Timer // message_timeout, or nil
	extended bool        // by override_message_timeout
}

// passes reports whether the body goes by the server.
func (s *side) passes() bool { return s.raw || s.x.closed || s.mode.body == none }

func (s *side) owes(p part) bool { return len(s.owed) > 0 && s.owed[0].part == p }

// reads reports whether the source may be read: what is on its way is bounded, except that BUFFERED goes on until it is
// too large.
func (s *side) reads() bool {
	switch {
	case s.ended:
		return false
	case s.mode.body == buffered && !s.passes() && !s.owes(headersPart):
		return true
	}
	return len(s.held)+s.owedBytes+s.queuedBytes+s.out.queued < s.x.limit
}

// expects reports whether the side may have something for the server, or is owed something by it.
func (s *side) expects() bool {
	switch {
	case s.whole && !s.response:
		return true // measured on 1.40: such a request keeps the stream open
	case s.finished:
		return false
	case s.head == nil:
		return s.mode.headers || s.mode.body != none || s.mode.trailers
	case len(s.owed) > 0:
		return true
	}
	return s.mode.body != none || s.mode.trailers
}

// begin takes the headers.
func (s *side) begin(head fields, end bool) {
	s.head, s.noBody, s.ended = head, end, end
	if s.x.dropped {
		if s.mode.headers {
			s.x.send(s, s.headersMessage(end), 0)
		}
		return
	}
	ask := s.mode.headers && !s.x.closed
	if ask {
		s.ask(headersPart, nil, end)
	}
	if s.mode.body != none && !s.x.closed && !s.x.cfg.AllowContentLengthHeader &&
		(s.mode.body != buffered || !s.mode.headers) {
		delete(head, "content-length") // see BodySendMode in processing_mode.proto
	}
	if !ask || s.x.cfg.ObservabilityMode {
		s.proceed()
	}
}

// proceed goes on where the headers need not wait for the server any more.
func (s *side) proceed() {
	s.release()
	if s.noBody {
		s.finish(nil)
	} else {
		s.flush()
	}
}

// take takes what the source has read.
func (s *side) take(c chunk) {
	if s.ended = c.end; c.trailer != nil {
		s.trailers = fieldsOf(c.trailer)
	}
	switch {
	case s.x.dropped:
		if s.mode.body == streamed || s.mode.body == duplex {
			s.x.send(s, s.bodyMessage(c.data, c.end), len(c.data))
		}
		return
	case s.finished:
		return
	}
	s.held = append(s.held, c.data...)
	s.flush()
}

// flush moves what is held as far as it may go now.
func (s *side) flush() {
	if s.finished || s.owes(headersPart) && (s.mode.body != duplex || s.x.closed) {
		return
	}
	whole := s.ended && s.trailers == nil // and the last body message says so
	switch {
	case s.passes():
		if s.released {
			s.out.write(s.hand())
		}
	case s.mode.body == buffered:
		if len(s.held) > s.x.limit {
			s.x.tooLarge(s)
			return
		}
		if s.ended && !s.bodySent && (len(s.held) > 0 || whole) {
			s.ask(bodyPart, s.hand(), whole)
		}
	case s.mode.body == partial:
		if !s.bodySent && (s.ended && (len(s.held) > 0 || whole) || len(s.held) >= s.x.limit) {
			s.ask(bodyPart, s.hand(), whole)
		}
	case len(s.held) > 0 || whole && !s.endSent:
		s.ask(bodyPart, s.hand(), whole)
	}
	// The end.
	switch {
	case !s.ended || len(s.owed) > 0 && (s.mode.body != duplex || s.trailersSent):
	case s.trailers != nil && s.mode.trailers && !s.x.closed:
		s.trailersSent = true
		s.ask(trailersPart, nil, true)
		if s.x.cfg.ObservabilityMode {
			s.finish(s.trailers)
		}
	case s.passes() || s.trailers != nil:
		s.finish(s.trailers)
	}
}

// hand empties what is held.
func (s *side) hand() []byte {
	b := s.held
	s.held = nil
	return b
}

// ask sends the server a message. Unless the mode says otherwise it owes an answer.
func (s *side) ask(p part, data []byte, end bool) {
	switch p {
	case headersPart:
		s.x.send(s, s.headersMessage(end), 0)
	case trailersPart:
		s.x.send(s, s.trailersMessage(), 0)
	case bodyPart:
		s.bodySent, s.endSent = true, end
		s.whole = s.mode.body == buffered || s.mode.body == partial || s.mode.body == streamed && !s.released
		n := 0
		if s.mode.body == duplex {
			n = len(data)
		}
		s.x.send(s, s.bodyMessage(data, end), n)
	}
	switch {
	case s.x.cfg.ObservabilityMode:
		if p == bodyPart {
			s.out.write(data)
			if end {
				s.finish(nil)
			}
		}
		return
	case s.mode.body == duplex && p == bodyPart:
		return // the server answers as it likes
	}
	s.owed, s.owedBytes = append(s.owed, owed{p, data, end}), s.owedBytes+len(data)
	if s.mode.body != duplex { // no timer there, not even on headers
		s.startTimer(s.x.timeout)
	}
}

func (s *side) startTimer(d time.Duration) {
	s.stopTimer()
	s.timer = time.NewTimer(d)
}

func (s *side) stopTimer() {
	if s.timer != nil {
		s.timer.Stop()
		s.timer = nil
	}
}

// answer takes the oldest owed message off: it has been answered. Others may be owed, but no timer runs for them until
// the next one is sent (measured on 1.40).
func (s *side) answer() owed {
	o := s.owed[0]
	s.owed, s.owedBytes, s.extended = s.owed[1:], s.owedBytes-len(o.data), false
	s.stopTimer()
	return o
}

// The on functions take a reply. They return the details of the error if the reply is one.

func (s *side) onHeaders(r *extprocpb.HeadersResponse, override *filterpb.ProcessingMode) string {
	if !s.owes(headersPart) {
		return spurious
	}
	s.answer()
	c := r.GetResponse()
	if !s.head.mutate(c.GetHeaderMutation(), s.fixed, s.x.errorf) {
		return invalidHeader
	}
	if override != nil {
		s.x.override(s, override)
	}
	if c.GetStatus() == extprocpb.CommonResponse_CONTINUE_AND_REPLACE {
		// No more messages for this side; without a body of the server's own, the original goes on.
		s.mode = mode{}
		if m := c.GetBodyMutation(); m.GetMutation() != nil {
			delete(s.head, "content-length")
			s.noBody, s.held = len(m.GetBody()) == 0, nil
			s.release()
			s.out.write(m.GetBody())
			s.finish(nil)
			return ""
		}
	}
	if s.waits() {
		s.flush()
	} else {
		s.proceed()
	}
	return ""
}

// waits reports whether the headers, although answered, go on only with the answer to what follows them: always where a
// body is buffered, else by chance, if all of the message was here before the headers' answer (measured on 1.36 to 1.40).
func (s *side) waits() bool {
	switch {
	case s.noBody:
		return false
	case s.trailers != nil && s.mode.trailers:
		return true
	case s.passes():
		return false
	case !s.ended:
		return s.mode.body == buffered || s.mode.body == partial
	}
	return len(s.held) > 0 || s.bodySent || s.trailers == nil
}

func (s *side) onBody(r *extprocpb.BodyResponse) string {
	c := r.GetResponse()
	streamedBody := c.GetBodyMutation().GetStreamedResponse()
	if s.mode.body == duplex {
		switch {
		case s.owes(headersPart) || !s.bodySent:
			return spurious
		case streamedBody == nil:
			return notStreamed
		}
		s.release()
		s.out.write(streamedBody.GetBody())
		if streamedBody.GetEndOfStream() {
			s.finish(nil)
		}
		return ""
	}
	switch {
	case !s.owes(bodyPart):
		return spurious
	case streamedBody != nil:
		return streamedUnasked
	}
	o := s.answer()
	if m := c.GetBodyMutation(); m.GetMutation() != nil {
		o.data = m.GetBody()
	}
	if !s.released && s.mode.body != streamed {
		if !s.head.mutate(c.GetHeaderMutation(), s.fixed, s.x.errorf) {
			return invalidHeader
		}
		if n := s.head.length(); n >= 0 && n != int64(len(o.data)) {
			return wrongLength
		}
	}
	s.raw = s.raw || s.mode.body == partial
	if !s.released && s.trailers != nil && s.mode.trailers && s.mode.body != partial { // all of it was here: the trailers are next, and all waits for them
		s.raw, s.held = true, o.data
		s.flush()
		return ""
	}
	s.release()
	s.out.write(o.data)
	if o.end {
		s.finish(nil)
	} else {
		s.flush()
	}
	return ""
}

func (s *side) onTrailers(r *extprocpb.TrailersResponse) string {
	if !s.owes(trailersPart) {
		return spurious
	}
	s.answer()
	if !s.trailers.mutate(r.GetHeaderMutation(), s.fixed, s.x.errorf) {
		return invalidHeader
	}
	s.release()
	s.out.write(s.hand())
	s.finish(s.trailers)
	return ""
}

func (s *side) fixed(name string) bool {
	return fixedInMessage(name) || name == ":status" && !s.response || name == ":path" && s.response
}

// letGo lets the message run on by the server: what it was asked about is forwarded as it was, but for the chunks of
// FULL_DUPLEX_STREAMED, which are the server's and lost with it.
func (s *side) letGo() {
	s.stopTimer()
	owed := s.owed
	s.owed, s.owedBytes = nil, 0
	if s.head == nil || s.finished {
		return
	}
	s.release()
	for _, o := range owed {
		s.out.write(o.data)
	}
	s.proceed()
}

// drop forgets the message: the client gets something else.
func (s *side) drop() {
	s.stopTimer()
	s.owed, s.owedBytes, s.held = nil, 0, nil
	s.ended = s.ended || !s.response || !s.x.keeps()
}

// quit stops a request whose rest nobody wants.
func (s *side) quit() {
	s.ended, s.finished, s.held = true, true, nil
	s.out.abort(io.EOF)
}

// release sends the headers on, once.
func (s *side) release() {
	if s.released {
		return
	}
	s.released = true
	if s.response {
		s.x.deliver()
	} else {
		s.x.startUpstream()
	}
}

// finish sends the end on.
func (s *side) finish(trailers fields) {
	if s.finished {
		return
	}
	s.finished = true
	s.release() // if it waited for a body that did not come
	var t http.Header
	if trailers != nil {
		t = trailers.header()
	}
	s.out.end(io.EOF, t)
	if s.response {
		s.x.responseDone()
	}
}

func (s *side) headersMessage(end bool) *extprocpb.ProcessingRequest {
	h := &extprocpb.HttpHeaders{Headers: s.head.proto(), EndOfStream: end}
	if s.response {
		return &extprocpb.ProcessingRequest{Request: &extprocpb.ProcessingRequest_ResponseHeaders{ResponseHeaders: h}}
	}
	return &extprocpb.ProcessingRequest{Request: &extprocpb.ProcessingRequest_RequestHeaders{RequestHeaders: h}}
}

func (s *side) bodyMessage(data []byte, end bool) *extprocpb.ProcessingRequest {
	b := &extprocpb.HttpBody{Body: bytes.Clone(data), EndOfStream: end} // the server may write to it
	if s.response {
		return &extprocpb.ProcessingRequest{Request: &extprocpb.ProcessingRequest_ResponseBody{ResponseBody: b}}
	}
	return &extprocpb.ProcessingRequest{Request: &extprocpb.ProcessingRequest_RequestBody{RequestBody: b}}
}

func (s *side) trailersMessage() *extprocpb.ProcessingRequest {
	t := &extprocpb.HttpTrailers{Trailers: s.trailers.proto()}
	if s.response {
		return &extprocpb.ProcessingRequest{Request: &extprocpb.ProcessingRequest_ResponseTrailers{ResponseTrailers: t}}
	}
	return &extprocpb.ProcessingRequest{Request: &extprocpb.ProcessingRequest_RequestTrailers{RequestTrailers: t}}
}
