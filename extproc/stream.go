package extproc

import (
	"context"
	"sync/atomic"
	"time"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/extevict/extevict/abort"
)

type processServer = extprocpb.ExternalProcessor_ProcessServer

// A Stream is an ext_proc stream whose request can be aborted. It is what a wrapped
// server gets, and stays safe to use after Process has returned.
//
// Unlike grpc's own stream it takes Send and Recv from several goroutines at once:
// they wait for each other. Several Sends that wait go out in no particular order.
type Stream struct {
	processServer // the proxy's
	own           *abort.Owner
	ctx           context.Context
	opts          *options
	facts         facts       // what the messages say about the response
	owed          owed        // the chunks that await a reply
	ended         atomic.Bool // Process has returned
	gone          atomic.Bool // the stream is seen to be over
	late          atomic.Bool // a message has crossed the abort

	receiving turn                              // to call processServer.Recv, or to wait for the reader; guards the next two
	recvErr   error                             // of the Recv that failed
	msgs      chan *extprocpb.ProcessingRequest // the reader's, if there is one; it closes it
	readErr   error                             // of the reader's Recv; set before msgs is closed

	sending turn // to call processServer.Send; guards the next
	tail    tail // of the response body as forwarded

	bench    bench         // where turns are waited for; its lock guards what follows
	answered chan struct{} // closed by answer when the answer is out; made when first needed
	report   *report       // nil without an observer
}

func newStream(ps processServer, o *options) *Stream {
	s := &Stream{processServer: ps, opts: o}
	s.bench.cond.L = &s.bench.mu
	if o.observe != nil {
		s.report = &report{}
	}
	s.own, s.ctx = abort.New(ps.Context())
	s.own.Handle().Attach(nil, (*settler)(s)) // the first hook: nobody else has the handle yet
	return s
}

// settler is the Stream as it hears of its request's outcome.
type settler Stream

// Settled implements abort.Settler.
func (st *settler) Settled(oc abort.Outcome) {
	s := (*Stream)(st)
	s.reportSettled(oc)
	if oc == abort.Aborted {
		go s.answer() // ends when the proxy has hung up, at the latest when Process has returned
	}
}

// Context returns the stream's context, which carries the request's abort.Handle and
// is canceled when the request is aborted.
func (s *Stream) Context() context.Context { return s.ctx }

// isAborted reports whether an abort has won.
func (s *Stream) isAborted() bool { return s.own.Handle().Err() != nil }

// aborted returns what Recv returns for an aborted request, else nil.
func (s *Stream) aborted() error {
	if e := s.own.Handle().Err(); e != nil {
		return &streamError{e}
	}
	return nil
}

// streamError is grpc's own error for a client that left, to the letter since
// servers compare code, text and identity; and it unwraps to the *abort.Error.
type streamError struct{ cause error }

var (
	canceled    = status.FromContextError(context.Canceled)
	errCanceled = canceled.Err()
)

func (e *streamError) Error() string              { return errCanceled.Error() }
func (e *streamError) Unwrap() error              { return e.cause }
func (e *streamError) GRPCStatus() *status.Status { return canceled }
func (e *streamError) Is(target error) bool {
	return errCanceled.(interface{ Is(error) bool }).Is(target)
}

// Recv returns the proxy's next message. For an aborted request it fails with
// grpc's error for a client that left (code Canceled), which also unwraps to the
// [*abort.Error]: at once if the request is aborted already, else at the next message,
// which is dropped, or when the proxy hangs up. io.EOF means that the proxy sends no
// more; replies that are owed still go out. Errors are sticky.
func (s *Stream) Recv() (*extprocpb.ProcessingRequest, error) { return s.receive(nil, false) }

// RecvMsg is Recv into m. If the stream has a reader (see RecvOrAbort), m must be a
// protobuf message.
func (s *Stream) RecvMsg(m any) error {
	req, err := s.receive(m, false)
	if err != nil || req == m {
		return err
	}
	if dst, ok := m.(proto.Message); ok && req != nil {
		proto.Reset(dst)
		proto.Merge(dst, req)
		return nil
	}
	if req != nil {
		return status.Errorf(codes.Internal, "extproc: RecvMsg behind RecvOrAbort: cannot fill a %T", m)
	}
	return nil
}

// RecvOrAbort is Recv that returns at once when the request is aborted, for loops
// that must not wait for the proxy. If a message and an abort come together, the
// abort wins. The first call starts the stream's one reader, a goroutine that ends
// with the stream; from then on Recv goes through it too. A message costs one hop
// between goroutines more than with Recv.
func (s *Stream) RecvOrAbort() (*extprocpb.ProcessingRequest, error) { return s.receive(nil, true) }

// receive takes the next message, into m if m is not nil and there is no reader.
func (s *Stream) receive(m any, viaReader bool) (*extprocpb.ProcessingRequest, error) {
	for {
		if s.isAborted() || !s.bench.take(&s.receiving, s.noReceiving) {
			return nil, s.refusal()
		}
		req, err := s.next(m, viaReader)
		if err != nil {
			return nil, s.fail(err)
		}
		if s.isAborted() {
			return nil, s.aborted() // the message crossed the abort
		}
		if s.facts.has(asked) && s.answerAsked(req) {
			continue
		}
		if h := req.GetRequestHeaders(); h != nil && !req.GetObservabilityMode() {
			s.track(req)
		}
		return req, nil
	}
}

func (s *Stream) noReceiving() bool { return s.isAborted() || s.ended.Load() }

// refusal is the error of a call that came too late.
func (s *Stream) refusal() error {
	if err := s.aborted(); err != nil {
		return err
	}
	return errCanceled
}

// track registers and tracks the request, by its headers.
func (s *Stream) track(req *extprocpb.ProcessingRequest) {
	if s.opts.registry != nil {
		s.opts.registry.Add(header(req.GetRequestHeaders(), "x-request-id"), s.own.Handle())
	}
	if s.opts.tracker != nil {
		if r, ok := s.opts.classify(s.ctx, req); ok {
			s.opts.tracker.TrackRequests(s.ctx, r)
		}
	}
}

// fail settles a request whose proxy sends no more, for the reason err, and returns
// what the server is told.
func (s *Stream) fail(err error) error {
	s.own.Settle(abort.Closed)
	if aerr := s.aborted(); aerr != nil {
		s.letGo(err) // err is how the proxy hung up
		return aerr
	}
	s.reportFailed(err)
	return err
}

// next receives and books one message. The caller has the turn to receive, which next
// gives back.
func (s *Stream) next(m any, viaReader bool) (req *extprocpb.ProcessingRequest, err error) {
	defer s.bench.give(&s.receiving) // deferred since Recv may be a decorator's, and panic
	if viaReader && s.msgs == nil && s.recvErr == nil {
		s.msgs = make(chan *extprocpb.ProcessingRequest)
		go s.read(s.msgs)
	}
	switch {
	case s.recvErr != nil:
		return nil, s.recvErr
	case s.ended.Load():
		return nil, errCanceled
	case s.msgs != nil:
		req, err = s.fromReader()
	case m != nil:
		err = s.processServer.RecvMsg(m)
		req, _ = m.(*extprocpb.ProcessingRequest)
	default:
		req, err = s.processServer.Recv()
	}
	if err != nil {
		s.recvErr = err
	} else if req != nil {
		s.book(req)
	}
	return req, err
}

// fromReader takes the reader's next message, or none if an abort comes before it or
// with it. The caller has the turn to receive.
func (s *Stream) fromReader() (*extprocpb.ProcessingRequest, error) {
	var req *extprocpb.ProcessingRequest
	var ok bool
	select {
	case req, ok = <-s.msgs:
	case <-s.ctx.Done():
		if s.isAborted() {
			return nil, nil
		}
		req, ok = <-s.msgs // the client left: the reader's Recv says how
	}
	if !ok {
		return nil, s.readErr
	}
	return req, nil
}

// read is the reader's goroutine. next starts it; it ends when the proxy's Recv fails,
// which grpc sees to when Process has returned.
func (s *Stream) read(msgs chan<- *extprocpb.ProcessingRequest) {
	defer close(msgs)
	for {
		req, err := s.recvProtected()
		if err != nil {
			s.readErr = err
			return
		}
		select {
		case msgs <- req:
		case <-s.ctx.Done():
			if s.isAborted() {
				msgs <- req // to answer, which takes all that comes
			}
		}
	}
}

func (s *Stream) recvProtected() (req *extprocpb.ProcessingRequest, err error) {
	defer recovered("Recv", &err)
	return s.processServer.Recv()
}

// Send sends a reply to the proxy. For an aborted request it drops the reply and
// returns nil, as grpc does with what is queued when a client leaves. After Process
// has returned it fails with code Canceled.
func (s *Stream) Send(r *extprocpb.ProcessingResponse) error { return s.send(r, nil) }

// SendMsg is Send of m.
func (s *Stream) SendMsg(m any) error {
	r, _ := m.(*extprocpb.ProcessingResponse)
	return s.send(r, m)
}

func (s *Stream) send(r *extprocpb.ProcessingResponse, m any) error {
	ends := endsRequest(r)
	if ends {
		s.own.Settle(abort.Closed) // before the turn: hooks may send too
	}
	if !s.bench.take(&s.sending, s.isAborted) {
		return nil
	}
	defer s.bench.give(&s.sending)
	// Decided and booked before the message leaves: an abort that comes later waits for
	// the turn, and finds the books as the proxy is going to see them.
	if s.isAborted() {
		return nil
	}
	if s.ended.Load() {
		return errCanceled
	}
	if s.keepsAlive(r) {
		r = askForTrailers(r, s.facts.requestMode())
		if m != nil {
			m = r
		}
	}
	if ends {
		s.facts.set(ownEnd)
	} else if !s.reply(r) {
		return nil
	}
	if m != nil {
		return s.processServer.SendMsg(m)
	}
	return s.processServer.Send(r)
}

// grace bounds what a proxy can cost that does not read, or does not hang up. A bare
// server's return frees its goroutines that are stuck in Send, so ours must in the end.
const grace = time.Second

// end is the end of Process. It settles the request, waits for the answer to an
// abort and for the proxy's hang-up, and then replaces what the server returned.
func (s *Stream) end(err *error) {
	defer s.letGo(nil)
	defer func() {
		s.ended.Store(true)
		s.bench.wake()
	}()
	s.own.Settle(abort.Closed)
	if s.isAborted() {
		*err = s.awaitHangUp()
	}
}

// awaitHangUp waits until the answer to an abort is out, since Envoy takes the end of a
// stream without one for "go on", and then until the proxy has hung up, which is the
// only confirmation that there is. Both together have the time of grace.
func (s *Stream) awaitHangUp() error {
	t := time.NewTimer(grace)
	defer t.Stop()
	hungUp := s.own.Handle().Done()
	select {
	case <-s.answerDone():
	case <-hungUp:
		return nil
	case <-t.C:
		return status.Error(codes.Aborted, "extproc: the proxy does not take the answer to an abort")
	}
	select {
	case <-hungUp:
	case <-t.C:
	}
	return nil
}

// answerDone returns the channel that answer closes.
func (s *Stream) answerDone() chan struct{} {
	s.bench.mu.Lock()
	defer s.bench.mu.Unlock()
	if s.answered == nil {
		s.answered = make(chan struct{})
	}
	return s.answered
}

// letGo is called whenever the stream is seen to be over: with Recv's error, or with
// nil when Process ends. The first call counts.
func (s *Stream) letGo(how error) {
	if s.gone.Swap(true) {
		return
	}
	s.bench.wake() // answer may wait for a chunk
	defer s.reportGone(how)
	s.own.Close()
}

// recovered, deferred, makes a panic an error: for user code, and for streams that
// user code decorates, on a goroutine that is not the server's.
func recovered(what string, err *error) {
	if p := recover(); p != nil {
		*err = status.Errorf(codes.Internal, "extproc: %s panicked: %v", what, p)
	}
}
