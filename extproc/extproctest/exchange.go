package extproctest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"
	"unicode"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/structpb"
)

// An exchange is one request on its way through Envoy. One goroutine, run's, owns all of it and does what Envoy's worker
// thread does: it waits for the next thing to happen and reacts without blocking. Goroutines that block feed it: one that
// runs Process, one that reads the client's body, and one that calls the upstream and reads its response.
type exchange struct {
	envoy   *Envoy
	cfg     *filterpb.ExternalProcessor
	limit   int           // BufferLimit
	timeout time.Duration // message_timeout
	delay   time.Duration // HangUpDelay
	req     *http.Request
	out     *http.Request // to the upstream, once its headers are released
	head    chan head     // run sends one
	entry   Entry

	request, response side
	upstream          chan head
	announced         http.Header // the upstream's trailers
	cancelUpstream    context.CancelFunc
	stopUpload        context.CancelFunc

	stream   *Stream     // nil before the first message
	queue    []message   // to the server
	served   chan served // Process has returned; sent once
	returned bool
	read     int // replies

	closed   bool // the filter asks nothing and heeds no reply any more; the request may run on
	dropped  bool // the request is over, too: the client has been answered, was reset, or left
	answered bool // the server has sent an ImmediateResponse
	headSent bool

	ending bool // the stream is to end, in the way that how says
	how    HangUp
	half   bool        // it is half-closed, or will be when the queue is empty
	hung   bool        // it is reset
	end    *time.Timer // for the next step, or nil
}

// head is what RoundTrip returns, of the upstream's or the exchange's.
type head struct {
	res     *http.Response
	err     error
	trailer http.Header // names announced
}

type message struct {
	msg  *extprocpb.ProcessingRequest
	side *side
	n    int // bytes of side.queuedBytes
}

type served struct {
	err   error
	panic any
}

func newExchange(e *Envoy, req *http.Request) *exchange {
	x := &exchange{
		envoy:    e,
		cfg:      e.checked(),
		limit:    e.BufferLimit,
		timeout:  200 * time.Millisecond,
		delay:    e.Quirks.HangUpDelay,
		req:      req,
		head:     make(chan head, 1),
		upstream: make(chan head),
		served:   make(chan served, 1),
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
	x.request = side{x: x, mode: requestMode(pm, nil), src: make(chan chunk), out: &sink{body: newBody(nil, nil)}}
	x.response = side{x: x, mode: responseMode(pm, nil), src: make(chan chunk), out: &sink{body: newBody(nil, nil)}, response: true}
	if x.cfg.ObservabilityMode { // other body modes don't exist there
		for _, s := range []*side{&x.request, &x.response} {
			if s.mode.body != streamed {
				s.mode.body = none
			}
		}
	}
	x.cancelUpstream = func() {}
	// A copy from before the body is read, since the trailers' values come while it is. That the client leaves is noticed by
	// run first, which cancels the upstream then.
	x.out = req.Clone(context.WithoutCancel(req.Context()))
	x.out.GetBody, x.out.Trailer = nil, names(req.Trailer)
	return x
}

func (x *exchange) run() {
	upload, stopUpload := context.WithCancel(context.Background())
	x.stopUpload = stopUpload
	h := x.requestHead()
	x.entry = Entry{RequestID: h.get("x-request-id"), Method: x.req.Method, Path: h.get(":path"), Details: "via_upstream"}
	hasBody := x.req.Body != nil && x.req.Body != http.NoBody
	if hasBody {
		context.AfterFunc(upload, func() { x.req.Body.Close() }) // ends a Read, too
		go pump(upload, x.req.Body, &x.req.Trailer, x.request.src)
	}
	x.request.begin(h, !hasBody)
	for !x.over() {
		x.wait()
	}
	x.cancelUpstream()
	x.stopUpload()
	x.entry.Bytes, x.entry.Complete = x.response.out.taken, x.response.out.final == io.EOF
	if x.envoy.AccessLog != nil {
		x.envoy.AccessLog(x.entry)
	}
}

// over reports whether the client has its response and the stream has ended.
func (x *exchange) over() bool {
	return x.clientDone() && (x.stream == nil || x.returned)
}

func (x *exchange) clientDone() bool { return x.headSent && x.response.out.done() }

// wait waits for the next thing to happen and does what follows from it.
func (x *exchange) wait() {
	var toServer chan<- *extprocpb.ProcessingRequest
	var next message
	var replies <-chan *extprocpb.ProcessingResponse
	if x.stream != nil && !x.returned {
		if len(x.queue) > 0 {
			toServer, next = x.stream.in, x.queue[0]
		} else if x.half {
			x.stream.HalfClose() // behind all messages
		}
		if !x.deaf() {
			replies = x.stream.Replies()
		}
	}
	var fromClient, fromUpstream <-chan chunk
	if x.request.reads() {
		fromClient = x.request.src
	}
	if x.response.reads() {
		fromUpstream = x.response.src
	}
	var left, closed <-chan struct{}
	if !x.clientDone() {
		left, closed = x.req.Context().Done(), x.response.out.closed
	}
	var unwanted <-chan struct{} // by an upstream that has closed the request's body
	if !x.request.out.done() {
		unwanted = x.request.out.closed
	}
	toUpstream, up := x.request.out.next()
	toClient, down := x.response.out.next()

	select {
	case toServer <- next.msg:
		x.queue = x.queue[1:]
		next.side.queuedBytes -= next.n
	case r := <-replies:
		x.read++
		x.reply(r)
	case r := <-x.served:
		x.ended(r)
	case c := <-fromClient:
		if c.err != nil {
			x.leave(c.err)
			break
		}
		x.request.take(c)
	case h := <-x.upstream:
		x.responseHead(h)
	case c := <-fromUpstream:
		if c.err != nil {
			x.reset("upstream_reset_after_response_started{connection_termination}", ErrReset)
			break
		}
		x.response.take(c)
	case toUpstream <- up:
		x.request.out.pop()
	case <-unwanted:
		x.request.out.abort(io.EOF)
	case toClient <- down:
		x.response.out.pop()
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

	if x.response.finished && !x.closed {
		// The request is over, and nobody was asked about its end.
		x.hangUp(HalfCloseThenReset, x.parting())
	}
	if x.how == HalfClose && x.half && !x.hung && x.end == nil && x.clientDone() {
		x.end = time.NewTimer(x.delay)
	}
}

func expired(t *time.Timer) <-chan time.Time {
	if t == nil {
		return nil
	}
	return t.C
}

// requestHead returns the request's headers as Envoy completes them.
func (x *exchange) requestHead() fields {
	r := x.req
	h := fieldsOf(r.Header)
	h.set(":method", r.Method)
	h.set(":scheme", r.URL.Scheme)
	h.set(":authority", r.Host)
	h.set(":path", r.URL.RequestURI())
	if r.Method == "" {
		h.set(":method", http.MethodGet)
	}
	if r.Host == "" {
		h.set(":authority", r.URL.Host)
	}
	if r.ContentLength > 0 {
		h.set("content-length", strconv.FormatInt(r.ContentLength, 10))
	}
	if h.get("x-request-id") == "" {
		var b [16]byte
		rand.Read(b[:])
		h.set("x-request-id", fmt.Sprintf("%x-%x-%x-%x-%x", b[:4], b[4:6], b[6:8], b[8:10], b[10:]))
	}
	if h.get("x-forwarded-proto") == "" {
		h.set("x-forwarded-proto", r.URL.Scheme)
	}
	return h
}

// startUpstream sends the request's headers to the upstream.
func (x *exchange) startUpstream() {
	ctx, cancel := context.WithCancel(x.out.Context())
	x.cancelUpstream = cancel
	h, out := x.request.head, x.out.WithContext(ctx)
	out.Method, out.Host, out.Header = h.get(":method"), h.get(":authority"), h.header()
	delete(out.Header, "Content-Length")
	if u, err := url.ParseRequestURI(h.get(":path")); err != nil {
		x.errorf("bad :path: %v", err)
	} else {
		out.URL.Path, out.URL.RawPath, out.URL.RawQuery = u.Path, u.RawPath, u.RawQuery
	}
	if x.request.noBody {
		out.Body, out.ContentLength = nil, 0
	} else {
		out.Body, out.ContentLength = x.request.out.body, h.length()
		x.request.out.trailer = &out.Trailer
	}
	upstream := x.envoy.Upstream
	if upstream == nil {
		upstream = http.DefaultTransport
	}
	go func() { // ends with the upstream's response, or soon after ctx
		res, err := upstream.RoundTrip(out)
		if err == nil {
			defer res.Body.Close()
		}
		h := head{res: res, err: err}
		if err == nil {
			h.trailer = names(res.Trailer)
		}
		select {
		case x.upstream <- h:
		case <-ctx.Done():
			return
		}
		if err == nil {
			pump(ctx, res.Body, &res.Trailer, x.response.src)
		}
	}()
}

// responseHead takes what the upstream has answered.
func (x *exchange) responseHead(h head) {
	if h.err != nil {
		if !x.dropped {
			x.upstreamFailed(h.err)
		}
		return
	}
	f := fieldsOf(h.res.Header)
	f.set(":status", strconv.Itoa(h.res.StatusCode))
	if h.res.ContentLength > 0 && f.length() < 0 {
		f.set("content-length", strconv.FormatInt(h.res.ContentLength, 10))
	}
	x.announced = h.trailer
	if !x.dropped {
		x.entry.Code = h.res.StatusCode
	}
	x.response.begin(f, h.res.Body == http.NoBody || h.res.ContentLength == 0 || !bodyAllowed(x.req.Method, h.res.StatusCode))
}

// upstreamFailed answers for an upstream that gave no response. Envoy shows its own replies to the server as if they were
// the upstream's, since 1.37.
func (x *exchange) upstreamFailed(err error) {
	reason := "connection_termination"
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Op == "dial" {
		reason = "remote_connection_failure"
	}
	x.ownReply(http.StatusServiceUnavailable, "upstream_reset_before_response_started{"+reason+"}",
		"upstream connect error or disconnect/reset before headers. reset reason: "+strings.ReplaceAll(reason, "_", " "))
}

// ownReply answers the client through the filter. The request is not sent any further.
func (x *exchange) ownReply(code int, details, body string) {
	x.entry.Code, x.entry.Details = code, details
	x.stopUpload()
	x.request.quit()
	x.response.begin(fields{
		":status":        {strconv.Itoa(code)},
		"content-length": {strconv.Itoa(len(body))},
		"content-type":   {"text/plain"},
	}, false)
	x.response.take(chunk{data: []byte(body), end: true})
}

// tooLarge ends what BUFFERED cannot buffer.
func (x *exchange) tooLarge(s *side) {
	switch {
	case !s.response && x.response.head != nil:
		x.reset("request_payload_too_large", ErrReset)
		return
	case !s.response:
		x.ownReply(http.StatusRequestEntityTooLarge, "request_payload_too_large", "Payload Too Large")
		return
	}
	x.localReply(http.StatusInternalServerError, nil, []byte("Internal Server Error"), "response_payload_too_large")
	x.hangUp(Reset, 0)
}

// deliver sends the response's headers to the client.
func (x *exchange) deliver() {
	h := x.response.head
	code, _ := strconv.Atoi(h.get(":status"))
	res := &http.Response{
		Status:     fmt.Sprintf("%03d %s", code, http.StatusText(code)),
		StatusCode: code,
		Proto:      "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header:        h.header(),
		Body:          x.response.out.body,
		ContentLength: h.length(),
		Trailer:       x.announced,
		Request:       x.req,
	}
	if res.ContentLength < 0 && x.response.noBody && x.req.Method != http.MethodHead {
		res.ContentLength = 0
	}
	x.response.out.trailer = &res.Trailer
	x.entry.Code = code
	x.answerClient(head{res: res})
}

func (x *exchange) answerClient(h head) {
	x.headSent = true
	x.head <- h
}

// names returns the names in h without their values.
func names(h http.Header) http.Header {
	if len(h) == 0 {
		return nil
	}
	n := make(http.Header, len(h))
	for k := range h {
		n[k] = nil
	}
	return n
}

// responseDone is called when the end of the response has gone on: nothing else of the request matters then.
func (x *exchange) responseDone() {
	x.cancelUpstream()
	x.stopUpload()
	x.response.ended = true
	x.request.quit()
}

// send queues a message for the server; the first opens the stream.
func (x *exchange) send(s *side, m *extprocpb.ProcessingRequest, n int) {
	if x.hung || x.half || x.returned {
		return
	}
	m.ObservabilityMode = x.cfg.ObservabilityMode
	if x.stream == nil {
		if !x.cfg.ObservabilityMode {
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

// deaf reports whether the server's messages are left unread.
func (x *exchange) deaf() bool {
	return x.ending && x.how == Never || x.stalled()
}

func (x *exchange) stalled() bool {
	n := x.envoy.Quirks.StopReading
	return n > 0 && x.read >= n
}

// reply takes a message from the server.
func (x *exchange) reply(r *extprocpb.ProcessingResponse) {
	if x.answered {
		x.errorf("a message follows the ImmediateResponse: %v", r)
		if x.envoy.Quirks.HangUp != Ignore {
			return
		}
	}
	x.answered = x.answered || r.GetImmediateResponse() != nil
	if x.closed || x.cfg.ObservabilityMode {
		return
	}
	if r.OverrideMessageTimeout != nil {
		x.extend(r)
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
		if x.response.mode.body == duplex && !x.response.owes(trailersPart) {
			// Measured on 1.37 and later: the stream is closed, and the rest of the response passes.
			x.errorf("trailers without a question")
			x.letGo()
			x.hangUp(Reset, 0)
			return
		}
		details = x.response.onTrailers(m.ResponseTrailers)
	case *extprocpb.ProcessingResponse_ImmediateResponse:
		x.immediate(m.ImmediateResponse)
		return
	default:
		details = "unhandled_message"
	}
	switch {
	case details != "":
		x.errorf("%s: %v", details, r)
		x.fail(x.errorStatus(), details, Reset)
	case x.response.finished, !x.request.expects() && !x.response.expects():
		// No phase needs the server any more. Envoy closes the stream since 1.37, and the request runs on.
		how := x.envoy.Quirks.HangUp
		if how != HalfClose && how != HalfCloseThenReset {
			how = Reset
		}
		x.hangUp(how, 0)
	}
}

// extend gives the server more time. All else in such a message is ignored, even an ImmediateResponse.
func (x *exchange) extend(r *extprocpb.ProcessingResponse) {
	if r.Response != nil {
		x.errorf("override_message_timeout hides the rest of the message: %v", r)
	}
	d := r.OverrideMessageTimeout.AsDuration()
	for _, s := range []*side{&x.request, &x.response} {
		if s.timer != nil && !s.extended && d >= time.Millisecond && d <= x.cfg.GetMaxMessageTimeout().AsDuration() {
			s.extended = true
			s.startTimer(d)
			return
		}
	}
	x.errorf("override_message_timeout without effect")
}

// override changes the modes of what follows the headers.
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

// metadata records the dynamic metadata of a reply that the configuration lets in.
func (x *exchange) metadata(r *extprocpb.ProcessingResponse) {
	for _, ns := range x.cfg.GetMetadataOptions().GetReceivingNamespaces().GetUntyped() {
		m := r.GetDynamicMetadata().GetFields()[ns].GetStructValue()
		switch {
		case m == nil:
		case x.entry.Metadata[ns] == nil:
			if x.entry.Metadata == nil {
				x.entry.Metadata = make(map[string]*structpb.Struct)
			}
			x.entry.Metadata[ns] = m
		default:
			proto.Merge(x.entry.Metadata[ns], m)
		}
	}
}

func (x *exchange) immediate(r *extprocpb.ImmediateResponse) {
	quirks := &x.envoy.Quirks
	if quirks.HangUp == Ignore {
		return
	}
	if x.cfg.DisableImmediateResponse {
		const details = "unhandled_immediate_response_due_to_config_disabled_it"
		x.errorf(details)
		x.fail(x.errorStatus(), details, Reset)
		return
	}
	code := int(r.GetStatus().GetCode())
	if code < 200 {
		x.errorf("the ImmediateResponse's status of %d becomes 200", code)
		code = 200
	}
	x.localReply(code, r.GetHeaders(), r.GetBody(), underscores(r.GetDetails()))
	x.hangUp(quirks.HangUp, x.delay)
}

// keeps reports whether the upstream runs on although the client has been answered.
func (x *exchange) keeps() bool {
	return x.envoy.Quirks.KeepSending && x.answered && !x.half && !x.hung && !x.returned
}

func (x *exchange) timedOut() {
	// This closes the stream as a client's leaving does, and its status cannot be configured.
	x.fail(http.StatusGatewayTimeout, "ext_proc_error_per-message_timeout_exceeded", HalfCloseThenReset)
}

func (x *exchange) errorStatus() int {
	if s := x.cfg.GetStatusOnError(); s != nil {
		return int(s.GetCode())
	}
	return http.StatusInternalServerError
}

// fail ends the request because of the server, or lets it run on if failure_mode_allow says so. FULL_DUPLEX_STREAMED cannot:
// once it has chunks the server has the only copy.
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
		x.cancelUpstream()
		x.request.out.abort(io.ErrUnexpectedEOF)
	}
}

// localReply answers the client if the response's headers have not been released, and resets its response if they have.
func (x *exchange) localReply(code int, m *extprocpb.HeaderMutation, body []byte, details string) {
	x.drop(details)
	if x.response.released {
		x.response.out.end(ErrReset, nil)
		return
	}
	h := fields{":status": {strconv.Itoa(code)}, "content-length": {strconv.Itoa(len(body))}}
	if len(body) > 0 {
		h.set("content-type", "text/plain")
	}
	h.mutate(m, fixedInLocalReply, x.errorf)
	x.response.head, x.response.noBody, x.announced = h, len(body) == 0, nil
	x.response.release()
	if x.req.Method != http.MethodHead {
		x.response.out.write(bytes.Clone(body))
	}
	x.response.out.end(io.EOF, nil)
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

// leave ends a request whose client is gone.
func (x *exchange) leave(err error) {
	x.response.out.abort(err)
	x.reset("downstream_remote_disconnect", err)
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
		x.cancelUpstream() // after KeepSending
	}
}

// ended takes the end of Process.
func (x *exchange) ended(r served) {
	for more := !x.stalled(); more; { // what it sent before
		select {
		case m := <-x.stream.Replies():
			x.reply(m)
		default:
			more = false
		}
	}
	x.returned, x.queue = true, nil
	x.entry.Err, x.entry.Panic = r.err, r.panic
	if r.panic != nil {
		x.errorf("Process panicked: %v", r.panic)
	}
	if x.dropped {
		x.cancelUpstream()
	}
	if x.closed {
		return
	}
	switch {
	case r.panic != nil && x.read == 0:
		const reason = "upstream_connect_error_or_disconnect/reset_before_headers._reset_reason:_connection_termination"
		x.fail(x.errorStatus(), "ext_proc_error_gRPC_error_14{"+reason+"{upstream_reset_before_response_started{connection_termination}}}", Reset)
	case r.panic != nil:
		x.fail(x.errorStatus(), "ext_proc_error_gRPC_error_13{upstream_reset_after_response_started{connection_termination}}", Reset)
	case r.err != nil:
		s, ok := status.FromError(r.err)
		if !ok {
			s = status.FromContextError(r.err)
		}
		x.fail(x.errorStatus(), fmt.Sprintf("ext_proc_error_gRPC_error_%d{%s{via_upstream}}", s.Code(), underscores(s.Message())), Reset)
	default:
		for _, s := range []*side{&x.request, &x.response} {
			if s.mode.body == duplex && s.bodySent && !s.finished {
				x.errorf("Process returned before the end of a FULL_DUPLEX_STREAMED body: what it has not answered is lost")
			}
		}
		x.letGo()
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
