package extproctest

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
	"unicode"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/status"
)

// An exchange is one request on its way through Envoy. One goroutine, run's, owns all of it and does what Envoy's worker
// thread does: it waits for the next thing to happen and reacts without blocking. Goroutines that block feed it: one that
// runs Process, one that reads the client's body, and one that calls the upstream and reads its response.
//
// The exchange's own business is the stream and how all ends; side is the filter's logic, replies.go what the server's
// messages do, upstream.go the HTTP on both ends.
type exchange struct {
	envoy   *Envoy
	cfg     *filterpb.ExternalProcessor
	limit   int           // BufferLimit
	timeout time.Duration // message_timeout
	delay   time.Duration // HangUpDelay
	entry   Entry

	req               *http.Request
	stopUpload        context.CancelFunc // closes its body
	head              chan head          // what RoundTrip returns; run sends one
	headSent          bool
	request, response side

	out            *http.Request // to the upstream, once the headers are released
	upstream       chan head     // what it answers
	cancelUpstream context.CancelFunc
	announced      http.Header // the names of its trailers

	stream   *Stream   // nil before the first message
	queue    []message // to the server
	read     int       // messages from it
	answered bool      // one of them was an ImmediateResponse
	served   chan served
	returned bool // served has been received

	closed  bool // the filter asks nothing and heeds no reply any more; the request may run on
	dropped bool // the request is over, too: the client has been answered, was reset, or left

	ending bool        // the stream is to end, as how says
	how    HangUp      //
	half   bool        // it is half-closed, or will be when the queue is empty
	hung   bool        // it is reset
	end    *time.Timer // for the next step, or nil
}

// head is the start of a response, or its failure.
type head struct {
	res     *http.Response
	err     error
	trailer http.Header // names announced
}

// message is one to the server.
type message struct {
	msg  *extprocpb.ProcessingRequest
	side *side
	n    int // how many of side.queuedBytes
}

// served is the end of Process.
type served struct {
	err   error
	panic any
}

func newExchange(e *Envoy, req *http.Request) *exchange {
	x := &exchange{
		envoy:          e,
		cfg:            e.checked(),
		limit:          e.BufferLimit,
		timeout:        200 * time.Millisecond,
		delay:          e.Quirks.HangUpDelay,
		req:            req,
		head:           make(chan head, 1),
		upstream:       make(chan head),
		cancelUpstream: func() {},
		served:         make(chan served, 1),
	}
	if x.limit == 0 {
		x.limit = 1 << 20
	}
	if x.delay == 0 {
		x.delay = time.Millisecond
	}
	if t := x.cfg.GetMessageTimeout(); t != nil {
		x.timeout = t.AsDuration()
	}
	pm := x.cfg.GetProcessingMode()
	x.request = side{x: x, mode: requestMode(pm, nil), src: make(chan chunk), out: &sink{body: newBody(nil)}}
	x.response = side{x: x, mode: responseMode(pm, nil), src: make(chan chunk), out: &sink{body: newBody(nil)}, response: true}
	if x.cfg.ObservabilityMode { // which has no other body modes
		for _, s := range x.sides() {
			if s.mode.body != streamed {
				s.mode.body = none
			}
		}
	}
	// A copy from before the body is read, since the trailers' values come while it is. It has no part in the end of the
	// client's context: run notices that first, and ends the upstream's.
	x.out = req.Clone(context.WithoutCancel(req.Context()))
	x.out.GetBody = nil
	return x
}

func (x *exchange) sides() [2]*side { return [2]*side{&x.request, &x.response} }

func (x *exchange) run() {
	x.start()
	for !x.clientDone() || x.stream != nil && !x.returned {
		x.wait()
	}
	x.stopUpstream()
	x.stopUpload()
	x.entry.Bytes = x.response.out.taken
	x.entry.Complete = x.entry.Complete || x.response.out.final == io.EOF
	if x.envoy.AccessLog != nil {
		x.envoy.AccessLog(x.entry)
	}
}

// clientDone reports whether the client has, or has refused, all it gets.
func (x *exchange) clientDone() bool { return x.headSent && x.response.out.done() }

// wait waits for the next thing to happen and does what follows from it.
func (x *exchange) wait() {
	var toServer chan<- *extprocpb.ProcessingRequest
	var next message
	var fromServer <-chan *extprocpb.ProcessingResponse
	if x.stream != nil && !x.returned {
		if len(x.queue) > 0 {
			toServer, next = x.stream.in, x.queue[0]
		} else if x.half {
			x.stream.HalfClose() // behind all messages
		}
		if !x.stalled() && !(x.ending && x.how == Never) {
			fromServer = x.stream.Replies()
		}
	}
	var fromClient, fromUpstream <-chan chunk
	if x.request.reads() {
		fromClient = x.request.src
	}
	if x.response.reads() {
		fromUpstream = x.response.src
	}
	var left, closed, unwanted <-chan struct{}
	if !x.clientDone() {
		left, closed = x.req.Context().Done(), x.response.out.closed
	}
	if !x.request.out.done() {
		unwanted = x.request.out.closed
	}
	toUpstream, up := x.request.out.next()
	toClient, down := x.response.out.next()

	select {
	case toServer <- next.msg:
		x.queue = x.queue[1:]
		next.side.queuedBytes -= next.n
	case r := <-fromServer:
		x.reply(r)
	case r := <-x.served:
		x.processEnded(r)
	case c := <-fromClient:
		if c.err != nil {
			x.leave(c.err)
		} else {
			x.request.take(c)
		}
	case h := <-x.upstream:
		x.responseHead(h)
	case c := <-fromUpstream:
		if c.err != nil {
			x.reset("upstream_reset_after_response_started{connection_termination}", ErrReset)
		} else {
			x.response.take(c)
		}
	case toUpstream <- up:
		x.request.out.pop()
	case toClient <- down:
		x.response.out.pop()
	case <-unwanted: // the upstream has closed the request's body
		x.request.out.abort(io.EOF)
	case <-left:
		x.leave(context.Cause(x.req.Context()))
	case <-closed:
		x.leave(http.ErrBodyReadAfterClose)
	case <-expired(x.request.timer):
		x.timedOut()
	case <-expired(x.response.timer):
		x.timedOut()
	case <-expired(x.end):
		x.endStep()
	}

	switch {
	case x.response.finished && !x.closed: // the request is over, and the server was not asked about its end
		x.hangUp(HalfCloseThenReset, x.parting())
	case x.how == HalfClose && x.half && !x.hung && x.end == nil && x.clientDone():
		x.endAfter(x.delay)
	}
}

func expired(t *time.Timer) <-chan time.Time {
	if t == nil {
		return nil
	}
	return t.C
}

// send queues a message for the server; the first opens the stream.
func (x *exchange) send(s *side, m *extprocpb.ProcessingRequest, n int) {
	if x.hung || x.half || x.returned {
		return
	}
	m.ObservabilityMode = x.cfg.ObservabilityMode
	if x.stream == nil {
		if !x.cfg.ObservabilityMode { // measured on 1.40
			m.ProtocolConfig = &extprocpb.ProtocolConfiguration{RequestBodyMode: x.request.mode.body, ResponseBodyMode: x.response.mode.body}
		}
		x.open()
	}
	x.queue = append(x.queue, message{m, s, n})
	s.queuedBytes += n
}

func (x *exchange) open() {
	window := x.envoy.Quirks.Window
	if window == 0 {
		window = 64
	}
	x.stream = NewStream(context.Background(), window)
	x.stream.Pause = x.envoy.Quirks.Pause
	go func() { // ends with Process
		var r served
		defer func() {
			r.panic = recover()
			x.served <- r
		}()
		r.err = x.stream.Serve(x.envoy.Server)
	}()
}

// processEnded takes the end of Process.
func (x *exchange) processEnded(r served) {
	for sent := true; sent && !x.stalled(); { // before it ended
		select {
		case m := <-x.stream.Replies():
			x.reply(m)
		default:
			sent = false
		}
	}
	x.returned, x.queue = true, nil
	x.entry.Err, x.entry.Panic = r.err, r.panic
	if r.panic != nil {
		x.errorf("Process panicked: %v", r.panic)
	}
	switch {
	case x.dropped:
		x.stopUpstream() // if it was kept
	case x.closed:
	case r.panic != nil && x.read == 0:
		x.failed(14, "upstream connect error or disconnect/reset before headers. reset reason: connection termination",
			"upstream_reset_before_response_started{connection_termination}")
	case r.panic != nil:
		x.failed(13, "", "upstream_reset_after_response_started{connection_termination}")
	case r.err != nil:
		s, ok := status.FromError(r.err)
		if !ok {
			s = status.FromContextError(r.err) // as grpc-go does
		}
		x.failed(int(s.Code()), s.Message(), "via_upstream")
	default:
		for _, s := range x.sides() {
			if s.mode.body == duplex && s.bodySent && !s.finished {
				x.errorf("Process returned before the end of a FULL_DUPLEX_STREAMED body: chunks without an answer are lost")
			}
		}
		x.letGo()
	}
}

// failed ends the request for a failure of the stream.
func (x *exchange) failed(code int, message, how string) {
	if message != "" {
		how = "{" + how + "}"
	}
	x.fail(x.errorStatus(), fmt.Sprintf("ext_proc_error_gRPC_error_%d{%s%s}", code, underscores(message), how), Reset)
}

func (x *exchange) timedOut() {
	// Its status cannot be configured, and the stream ends as it does when a client leaves (measured on 1.40).
	x.fail(http.StatusGatewayTimeout, "ext_proc_error_per-message_timeout_exceeded", HalfCloseThenReset)
}

// errorStatus is what the client gets for a server's mistakes.
func (x *exchange) errorStatus() int {
	if s := x.cfg.GetStatusOnError(); s != nil {
		return int(s.GetCode())
	}
	return http.StatusInternalServerError
}

// fail ends the request because of the server, or lets it run on if failure_mode_allow says so. Once a server has chunks in
// FULL_DUPLEX_STREAMED, Envoy cannot do that: it has no copy.
func (x *exchange) fail(code int, details string, how HangUp) {
	lost := x.request.mode.body == duplex && x.request.bodySent || x.response.mode.body == duplex && x.response.bodySent
	if x.cfg.FailureModeAllow && !lost {
		x.letGo()
	} else {
		x.localReply(code, nil, nil, details)
	}
	x.hangUp(how, 0)
}

// letGo ends the filter's work; the request runs on.
func (x *exchange) letGo() {
	x.closed = true
	x.request.letGo()
	x.response.letGo()
}

// drop ends the request but for what the client still gets.
func (x *exchange) drop(details string) {
	x.closed, x.dropped, x.entry.Details = true, true, details
	x.request.drop()
	x.response.drop()
	x.stopUpload()
	if !x.keeps() {
		x.stopUpstream()
	}
}

// stopUpstream resets the upstream's request.
func (x *exchange) stopUpstream() {
	x.cancelUpstream()
	x.request.out.abort(io.ErrUnexpectedEOF)
}

// keeps reports whether the upstream runs on although the client has been answered.
func (x *exchange) keeps() bool {
	return x.envoy.Quirks.KeepSending && x.answered && !x.half && !x.hung && !x.returned
}

// reset ends the request without an answer.
func (x *exchange) reset(details string, err error) {
	if x.dropped {
		return
	}
	x.drop(details)
	x.response.out.end(err, nil)
	if !x.headSent {
		x.answerClient(head{err: err})
	}
	x.hangUp(HalfCloseThenReset, x.parting())
}

// leave ends a request whose client is gone. If all of the response had been sent, that is no news to Envoy.
func (x *exchange) leave(err error) {
	out := x.response.out
	if x.entry.Complete = out.ending && out.err == io.EOF; x.entry.Complete {
		out.taken += int64(out.queued)
	}
	out.abort(err)
	if !x.response.finished {
		x.reset("downstream_remote_disconnect", err)
	}
}

// parting is how long the stream outlives the request.
func (x *exchange) parting() time.Duration {
	if !x.cfg.ObservabilityMode {
		return 0
	}
	if t := x.cfg.GetDeferredCloseTimeout(); t != nil {
		return t.AsDuration()
	}
	return 5 * time.Second
}

// hangUp ends the stream after a while, in the given way. The filter's work ends at once.
func (x *exchange) hangUp(how HangUp, after time.Duration) {
	x.closed = true
	if x.stream == nil || x.ending || x.returned {
		return
	}
	x.ending, x.how = true, how
	if how != Never {
		x.endAfter(after)
	}
}

func (x *exchange) endAfter(d time.Duration) {
	if d <= 0 {
		x.endStep()
		return
	}
	x.end = time.NewTimer(d)
}

func (x *exchange) endStep() {
	x.end = nil
	if x.how == Reset || x.half {
		x.hung, x.queue = true, nil
		x.stream.HangUp()
	} else {
		x.half = true
		if x.how == HalfCloseThenReset {
			x.endAfter(x.delay)
		}
	}
	if x.dropped {
		x.stopUpstream() // if it was kept
	}
}

func (x *exchange) errorf(format string, args ...any) {
	if x.envoy.Errorf != nil {
		x.envoy.Errorf("extproctest: %s %s (%s): %s", x.entry.Method, x.entry.Path, x.entry.RequestID, fmt.Sprintf(format, args...))
	}
}

// underscores is how Envoy writes details.
func underscores(s string) string {
	return strings.Map(func(r rune) rune {
		if unicode.IsSpace(r) {
			return '_'
		}
		return r
	}, s)
}
