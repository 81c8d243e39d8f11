package extproc

import (
	"context"
	"sync"
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

	// mu guards what follows. It is held for bookkeeping only: never across a call
	// into grpc, hooks, options or other user code. Who waits for a turn waits on cond,
	// which is idle time in a synctest bubble; a mutex held across Send would not be.
	mu        sync.Mutex
	cond      sync.Cond
	waiting   int                               // for a turn
	sending   bool                              // somebody is in processServer.Send
	receiving bool                              // somebody is in processServer.Recv, or waits for the reader
	ended     bool                              // Process has returned
	recvErr   error                             // of the Recv that failed
	msgs      chan *extprocpb.ProcessingRequest // the reader's, if there is one; it closes it
	answered  chan struct{}                     // closed by answer when it is done; made when first needed
	books     books
	report    report
}

// report is what the observer is going to be told. Guarded by Stream.mu.
type report struct {
	event    Event
	settled  bool // event has the outcome
	answered bool // answer is done
	gone     bool // the stream is over
	told     bool
}

func newStream(ps processServer, o *options) *Stream {
	s := &Stream{processServer: ps, opts: o}
	s.cond.L = &s.mu
	s.own, s.ctx = abort.New(ps.Context())
	s.own.Handle().Attach(nil, (*settler)(s)) // the first hook: nobody else has the handle yet
	return s
}

// settler is the Stream as it hears of its request's outcome.
type settler Stream

// Settled implements abort.Settler.
func (st *settler) Settled(oc abort.Outcome) {
	s := (*Stream)(st)
	if s.opts.observe != nil {
		phase := s.own.Handle().Progress().Phase
		s.tell(func(r *report) {
			r.settled = true
			r.event.Outcome, r.event.Phase, r.event.Settled = oc, phase, time.Now()
		})
	}
	if oc == abort.Aborted {
		go s.answer() // ends when the answer is sent, or the stream is gone
	}
}

// Context returns the stream's context, which carries the request's abort.Handle and
// is canceled when the request is aborted.
func (s *Stream) Context() context.Context { return s.ctx }

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
// [*abort.Error]: at once if the request is aborted already, else at the next message, which is
// dropped, or when the proxy hangs up. io.EOF means that the proxy sends no more;
// replies that are owed still go out. Errors are sticky.
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
	s.mu.Lock()
	for s.receiving && s.own.Handle().Err() == nil {
		s.waitLocked()
	}
	err := s.recvErr
	if err == nil && s.ended {
		err = errCanceled
	}
	if aerr := s.aborted(); aerr != nil || err != nil {
		s.mu.Unlock()
		if aerr != nil {
			return nil, aerr
		}
		return nil, s.fail(err)
	}
	s.receiving = true
	if viaReader && s.msgs == nil {
		s.msgs = make(chan *extprocpb.ProcessingRequest)
		go s.read(s.msgs)
	}
	msgs := s.msgs
	s.mu.Unlock()

	req, err := s.next(m, msgs)
	if err != nil {
		return nil, s.fail(err)
	}
	if err := s.aborted(); err != nil {
		return nil, err // the message crossed the abort
	}
	if h := req.GetRequestHeaders(); h != nil && !req.GetObservabilityMode() {
		if s.opts.registry != nil {
			s.opts.registry.Add(header(h, "x-request-id"), s.own.Handle())
		}
		if s.opts.tracker != nil {
			if r, ok := s.opts.classify(s.ctx, req); ok {
				s.opts.tracker.TrackRequests(s.ctx, r)
			}
		}
	}
	return req, nil
}

// fail settles a request whose proxy sends no more, for the reason err, and returns
// what the server is told.
func (s *Stream) fail(err error) error {
	s.own.Settle(abort.Closed)
	if aerr := s.aborted(); aerr != nil {
		s.letGo() // err was the proxy's hang-up
		return aerr
	}
	return err
}

// next receives and books one message, for a caller that has the turn to receive,
// which next gives back.
func (s *Stream) next(m any, msgs <-chan *extprocpb.ProcessingRequest) (req *extprocpb.ProcessingRequest, err error) {
	defer func() { s.received(req, err) }() // deferred since Recv may be a decorator's, and panic
	switch {
	case msgs != nil:
		return s.fromReader(msgs)
	case m != nil:
		err = s.processServer.RecvMsg(m)
		req, _ = m.(*extprocpb.ProcessingRequest)
		return req, err
	}
	return s.processServer.Recv()
}

// received books what Recv returned and gives back the turn to receive.
func (s *Stream) received(req *extprocpb.ProcessingRequest, err error) {
	book := req != nil && err == nil && s.own.Handle().Err() == nil
	if book {
		// The end before the books: an abort that came between the two would be answered
		// as if there were more to come.
		if req.GetObservabilityMode() {
			s.own.Settle(abort.Closed) // Envoy does not listen
		} else if endsResponse(req) {
			s.own.Settle(abort.Completed)
		}
	}
	s.mu.Lock()
	if book {
		s.requestLocked(req)
	}
	if err != nil {
		s.recvErr = err
	}
	s.receiving = false
	wake := s.waiting > 0
	s.mu.Unlock()
	if wake {
		s.cond.Broadcast()
	}
}

// waitLocked waits for a turn to be given back, or an abort.
func (s *Stream) waitLocked() {
	s.waiting++
	s.cond.Wait()
	s.waiting--
}

// fromReader takes the reader's next message, or none if an abort comes before it or
// with it.
func (s *Stream) fromReader(msgs <-chan *extprocpb.ProcessingRequest) (*extprocpb.ProcessingRequest, error) {
	var req *extprocpb.ProcessingRequest
	var ok bool
	select {
	case req, ok = <-msgs:
	case <-s.ctx.Done():
		if s.own.Handle().Err() != nil {
			return nil, nil
		}
		req, ok = <-msgs // the client left: the reader's Recv says how
	}
	if !ok {
		s.mu.Lock()
		defer s.mu.Unlock()
		return nil, s.recvErr
	}
	return req, nil
}

// read is the reader's goroutine. receive starts it; it ends when the proxy's Recv
// fails, which grpc sees to when Process has returned.
func (s *Stream) read(msgs chan<- *extprocpb.ProcessingRequest) {
	defer close(msgs)
	for {
		req, err := s.recvProtected()
		if err != nil {
			s.mu.Lock()
			s.recvErr = err
			s.mu.Unlock()
			if s.own.Handle().Err() != nil {
				s.letGo()
			}
			return
		}
		select {
		case msgs <- req:
		case <-s.ctx.Done(): // nobody is going to want it
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
	if endsRequest(r) {
		s.own.Settle(abort.Closed) // before the lock: hooks run without
	}
	s.mu.Lock()
	for s.sending && s.own.Handle().Err() == nil {
		s.waitLocked()
	}
	// Decided and booked before the message leaves: an abort that comes later finds
	// the books as the proxy will see them, and waits for the turn.
	drop := s.own.Handle().Err() != nil
	if s.ended && !drop {
		s.mu.Unlock()
		return errCanceled
	}
	if drop || !s.replyLocked(r) {
		s.mu.Unlock()
		return nil
	}
	s.sending = true
	s.mu.Unlock()
	defer s.sent()
	if m != nil {
		return s.processServer.SendMsg(m)
	}
	return s.processServer.Send(r)
}

// sent gives back the turn to send.
func (s *Stream) sent() {
	s.mu.Lock()
	s.sending = false
	wake := s.waiting > 0
	s.mu.Unlock()
	if wake {
		s.cond.Broadcast()
	}
}

// grace bounds what a proxy that does not read can cost. A bare server's return frees
// its goroutines that are stuck in Send, so ours must in the end.
const grace = time.Second

// end is the end of Process. It settles the request, waits for the answer to an
// abort, and then replaces what the server returned.
func (s *Stream) end(err *error) {
	defer s.letGo()
	defer func() {
		s.mu.Lock()
		s.ended = true
		s.mu.Unlock()
		s.cond.Broadcast()
	}()
	s.own.Settle(abort.Closed)
	if s.own.Handle().Err() != nil {
		// Envoy takes the end of a stream for "go on" unless the answer comes first.
		*err = s.awaitAnswer()
	}
}

func (s *Stream) awaitAnswer() error {
	t := time.NewTimer(grace)
	defer t.Stop()
	select {
	case <-s.answerDone():
		return nil
	case <-s.processServer.Context().Done():
		return nil
	case <-t.C:
		return status.Error(codes.Aborted, "extproc: the proxy does not take the answer to an abort")
	}
}

// answerDone returns the channel that answer closes.
func (s *Stream) answerDone() chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.answered == nil {
		s.answered = make(chan struct{})
	}
	return s.answered
}

// letGo is called whenever the stream is seen to be over.
func (s *Stream) letGo() {
	defer s.tell(func(r *report) {
		if !r.gone {
			r.gone, r.event.Ended = true, time.Now()
		}
	})
	s.own.Close()
}

// tell changes the report, and tells the observer once it is complete.
func (s *Stream) tell(change func(*report)) {
	if s.opts.observe == nil {
		return
	}
	s.mu.Lock()
	r := &s.report
	change(r)
	complete := r.gone && r.settled && (r.answered || r.event.Outcome != abort.Aborted)
	first := complete && !r.told
	r.told = complete
	e := r.event
	s.mu.Unlock()
	if first {
		e.Handle = s.own.Handle()
		var err error
		defer recovered("observer", &err)
		s.opts.observe(e)
	}
}

// recovered, deferred, makes a panic an error: for user code, and for streams that
// user code decorates, on a goroutine that is not the server's.
func recovered(what string, err *error) {
	if p := recover(); p != nil {
		*err = status.Errorf(codes.Internal, "extproc: %s panicked: %v", what, p)
	}
}
