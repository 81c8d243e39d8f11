// Package extproc lets an ext_proc server's requests be aborted while they run.
//
// One rule keeps callers safe: a server needs no change and must not look for
// aborts. To it an aborted request is a client that left: its context is canceled,
// Recv fails with code Canceled, and what it still sends is dropped.
//
//	extprocpb.RegisterExternalProcessorServer(s, extproc.Wrap(yours))
//
// Each stream that Envoy opens gets an [abort.Handle], found by
// abort.FromContext(stream.Context()). Whoever aborts it has one ImmediateResponse
// sent on that stream, in whatever phase the request is. Envoy then answers the
// client, or resets it if response headers have been released, and resets the
// upstream connection.
//
// [Wrap] and [StreamInterceptor] are for servers as they are, [Handler] and
// [Stream.RecvOrAbort] for those that own their loop.
//
// What this needs of Envoy: the ext_proc stream must live as long as the request.
// Since Envoy 1.37 it ends as soon as no later phase is to be processed; a
// processing mode with response_trailer_mode SEND keeps it open, at no cost for
// responses without trailers. Also observability_mode and
// disable_immediate_response must be off.
package extproc

import (
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"
)

// Wrap returns a server that runs next with streams whose requests can be aborted.
// next.Process runs on the goroutine that grpc gave it; its panics, errors and early
// returns keep their meaning. If the request is aborted, Process returns nil, whatever
// next returns, when next has returned, the answer has gone out and the proxy has hung
// up, which Envoy does about a millisecond later. It waits for a second at most, and
// returns an error with code Aborted if the proxy has not taken the answer by then.
// Wrap panics if next is nil.
func Wrap(next extprocpb.ExternalProcessorServer, opts ...Option) extprocpb.ExternalProcessorServer {
	if next == nil {
		panic("extproc: Wrap: nil server")
	}
	return &server{serve: func(s *Stream) error { return next.Process(s) }, opts: newOptions(opts)}
}

// Handler returns a server that runs serve for each stream: for servers that own
// their loop and call [Stream.RecvOrAbort]. For everything else it is Wrap. It
// panics if serve is nil.
func Handler(serve func(*Stream) error, opts ...Option) extprocpb.ExternalProcessorServer {
	if serve == nil {
		panic("extproc: Handler: nil function")
	}
	return &server{serve: serve, opts: newOptions(opts)}
}

// StreamInterceptor does what Wrap does, for servers that register themselves with
// grpc and take only grpc.ServerOptions. Streams of other methods pass untouched. In
// a chain, what stands before it sees its messages, answers to aborts included; what
// stands after it is part of the server. Put recovery before it.
func StreamInterceptor(opts ...Option) grpc.StreamServerInterceptor {
	o := newOptions(opts)
	return func(srv any, ss grpc.ServerStream, info *grpc.StreamServerInfo, handler grpc.StreamHandler) error {
		if info.FullMethod != extprocpb.ExternalProcessor_Process_FullMethodName {
			return handler(srv, ss)
		}
		return run(&messageStream{ServerStream: ss}, o, func(s *Stream) error { return handler(srv, s) })
	}
}

type messageStream = grpc.GenericServerStream[extprocpb.ProcessingRequest, extprocpb.ProcessingResponse]

type server struct {
	extprocpb.UnimplementedExternalProcessorServer
	serve func(*Stream) error
	opts  *options
}

// Process implements extprocpb.ExternalProcessorServer.
func (s *server) Process(ps extprocpb.ExternalProcessor_ProcessServer) error {
	return run(ps, s.opts, s.serve)
}

func run(ps processServer, o *options, serve func(*Stream) error) (err error) {
	s := newStream(ps, o)
	defer s.end(&err) // also when serve panics, whose panic goes on
	return serve(s)
}
