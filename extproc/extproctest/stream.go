package extproctest

import (
	"context"
	"io"
	"sync"
	"sync/atomic"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

// A Stream is both ends of one ext_proc stream, in memory.
//
// The server's end is an [extprocpb.ExternalProcessor_ProcessServer] as strict as grpc-go's: one goroutine may receive
// beside one that sends, and a second one of either panics, where grpc would corrupt the stream in silence. Every error
// of Recv is final: it is returned again and again.
//
// The proxy's end is Push, Replies, HalfClose, HangUp and Serve. All of a Stream's methods may be called concurrently,
// with the exception just named.
type Stream struct {
	// Pause, if not nil, is called inside every Send and Recv, before and after the message passes. A test that sleeps a
	// little there, in a synctest bubble, finds races that hide in these windows. It is called by the sending and the
	// receiving goroutine at the same time. Set it before the stream is used.
	Pause func()

	ctx       context.Context
	cancel    context.CancelFunc
	in        chan *extprocpb.ProcessingRequest // to the server; unbuffered, so a message counts as sent when Recv has it
	out       chan *extprocpb.ProcessingResponse
	half      chan struct{} // closed by HalfClose
	closeHalf func()

	sending, receiving atomic.Bool
	recvErr            error // of Recv, guarded by receiving

	failed atomic.Pointer[error] // the status with which grpc ends the stream on its own
}

var _ extprocpb.ExternalProcessor_ProcessServer = (*Stream)(nil)

// NewStream returns a stream whose context descends from parent, as a grpc stream's does: parent ends when the proxy's
// connection is lost. Send blocks once window replies are unread, and with a window of 0 until its reply is read; grpc
// counts 64 KiB instead.
//
// A Stream holds no resources but its context, which Serve, HangUp or parent end.
func NewStream(parent context.Context, window int) *Stream {
	s := &Stream{
		in:   make(chan *extprocpb.ProcessingRequest),
		out:  make(chan *extprocpb.ProcessingResponse, window),
		half: make(chan struct{}),
	}
	s.ctx, s.cancel = context.WithCancel(parent)
	s.closeHalf = sync.OnceFunc(func() { close(s.half) })
	return s
}

// Context returns the stream's context. It ends when the proxy hangs up, when Process has returned, and with the parent.
func (s *Stream) Context() context.Context { return s.ctx }

// Recv returns the next message that was pushed. It fails with the context's error as grpc words it ("Canceled: context
// canceled") once the context has ended, and with io.EOF after a half-close.
func (s *Stream) Recv() (*extprocpb.ProcessingRequest, error) {
	if !s.receiving.CompareAndSwap(false, true) {
		panic("extproctest: concurrent Recv")
	}
	defer s.receiving.Store(false)
	if s.recvErr != nil {
		return nil, s.recvErr
	}
	s.pause()
	defer s.pause()
	if s.recvErr = s.ended(); s.recvErr != nil {
		return nil, s.recvErr
	}
	select {
	case r := <-s.in:
		return r, nil
	case <-s.half:
		s.recvErr = io.EOF
	case <-s.ctx.Done():
		s.recvErr = s.ended()
	}
	return nil, s.recvErr
}

// RecvMsg is Recv into m, a *ProcessingRequest.
func (s *Stream) RecvMsg(m any) error {
	r, err := s.Recv()
	if err != nil {
		return err
	}
	proto.Reset(m.(proto.Message))
	proto.Merge(m.(proto.Message), r)
	return nil
}

// Send sends a reply. It blocks while the window is full, and fails once the context has ended. The message is encoded
// before Send returns; as in grpc-go, one that does not encode (a string that is no UTF-8) fails and ends the stream with
// code Internal.
func (s *Stream) Send(r *extprocpb.ProcessingResponse) error {
	if !s.sending.CompareAndSwap(false, true) {
		panic("extproctest: concurrent Send")
	}
	defer s.sending.Store(false)
	s.pause()
	defer s.pause()
	if err := s.ended(); err != nil {
		return err
	}
	wire, err := proto.Marshal(r)
	if err != nil {
		err = status.Errorf(codes.Internal, "grpc: error while marshaling: %v", err)
		s.failed.Store(&err)
		s.cancel()
		return err
	}
	sent := new(extprocpb.ProcessingResponse)
	if err := proto.Unmarshal(wire, sent); err != nil {
		panic("extproctest: " + err.Error()) // what Marshal wrote
	}
	select {
	case s.out <- sent:
		return nil
	case <-s.ctx.Done():
		return s.ended()
	}
}

// SendMsg is Send of m, a *ProcessingResponse.
func (s *Stream) SendMsg(m any) error { return s.Send(m.(*extprocpb.ProcessingResponse)) }

// SetHeader, SendHeader and SetTrailer do nothing: Envoy makes no use of a server's metadata.
func (s *Stream) SetHeader(metadata.MD) error { return nil }

// SendHeader does nothing.
func (s *Stream) SendHeader(metadata.MD) error { return nil }

// SetTrailer does nothing.
func (s *Stream) SetTrailer(metadata.MD) {}

func (s *Stream) ended() error {
	if err := s.ctx.Err(); err != nil {
		return status.FromContextError(err).Err()
	}
	return nil
}

func (s *Stream) pause() {
	if s.Pause != nil {
		s.Pause()
	}
}

// Push sends a message to the server. It blocks until the server has received it and returns true, or until the stream
// has ended, also by HalfClose, and returns false. The message belongs to the server from then on.
func (s *Stream) Push(r *extprocpb.ProcessingRequest) bool {
	select {
	case <-s.half:
		return false
	default:
	}
	select {
	case s.in <- r:
		return true
	case <-s.half:
		return false
	case <-s.ctx.Done():
		return false
	}
}

// Replies returns the channel of what the server sends, in order. It is never closed: receive from it beside
// Context().Done(). Replies that were sent before the end can still be read after it.
func (s *Stream) Replies() <-chan *extprocpb.ProcessingResponse { return s.out }

// HalfClose says that no message will follow: Recv returns io.EOF, and the context lives on.
func (s *Stream) HalfClose() { s.closeHalf() }

// HangUp resets the stream: the context ends, and Recv and Send fail.
func (s *Stream) HangUp() { s.cancel() }

// Serve runs srv.Process on the stream and ends its context when Process has returned, as grpc does, or has panicked; the
// panic goes on. It returns the error that the proxy is told, normally the one of Process.
func (s *Stream) Serve(srv extprocpb.ExternalProcessorServer) error {
	defer s.cancel()
	err := srv.Process(s)
	if failed := s.failed.Load(); failed != nil {
		return *failed
	}
	return err
}
