package e2e_test

import (
	"context"
	"errors"
	"io"
	"slices"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
)

type (
	request  = extprocpb.ProcessingRequest
	response = extprocpb.ProcessingResponse
	process  = extprocpb.ExternalProcessor_ProcessServer
)

// A loop is an ext_proc server, which receives with recv.
type loop func(st process, recv func() (*request, error)) error

type serverFunc func(process) error

func (f serverFunc) Process(st process) error { return f(st) }

func (l loop) server() serverFunc {
	return func(st process) error { return l(st, st.Recv) }
}

// An adoption is how an ext_proc server takes the library in. It returns the server
// behind gRPC, for Envoy, and for the fake.
type adoption func(loop, ...extproc.Option) (*grpc.Server, extprocpb.ExternalProcessorServer)

// newServer takes any message. While Envoy waits for the reply to the headers of a
// STREAMED body it buffers what comes, and then sends it as one: for 10 MiB it was 7
// where grpc's limit is 4.
func newServer(opts ...grpc.ServerOption) *grpc.Server {
	return grpc.NewServer(append(opts, grpc.MaxRecvMsgSize(64<<20))...)
}

func register(gs *grpc.Server, srv extprocpb.ExternalProcessorServer) (*grpc.Server, extprocpb.ExternalProcessorServer) {
	extprocpb.RegisterExternalProcessorServer(gs, srv)
	return gs, srv
}

// wrapped is for servers as they are.
func wrapped(l loop, opts ...extproc.Option) (*grpc.Server, extprocpb.ExternalProcessorServer) {
	return register(newServer(), extproc.Wrap(l.server(), opts...))
}

// intercepted is for servers that only take grpc.ServerOptions.
func intercepted(l loop, opts ...extproc.Option) (*grpc.Server, extprocpb.ExternalProcessorServer) {
	intercept := extproc.StreamInterceptor(opts...)
	gs, srv := register(newServer(grpc.StreamInterceptor(intercept)), l.server())
	info := &grpc.StreamServerInfo{FullMethod: extprocpb.ExternalProcessor_Process_FullMethodName, IsClientStream: true, IsServerStream: true}
	return gs, serverFunc(func(st process) error {
		return intercept(srv, st, info, func(_ any, ss grpc.ServerStream) error {
			return srv.Process(&grpc.GenericServerStream[request, response]{ServerStream: ss}) // as the generated code does
		})
	})
}

// ownLoop is for servers that do not wait for Envoy to hang up.
func ownLoop(l loop, opts ...extproc.Option) (*grpc.Server, extprocpb.ExternalProcessorServer) {
	return register(newServer(), extproc.Handler(func(st *extproc.Stream) error { return l(st, st.RecvOrAbort) }, opts...))
}

// bare does without the library.
func bare(l loop, _ ...extproc.Option) (*grpc.Server, extprocpb.ExternalProcessorServer) {
	return register(newServer(), l.server())
}

// process is the world's ext_proc server: it has the evictor track each call, with
// the call's uri for an endpoint, and lets everything pass.
func (w *world) process(st process, recv func() (*request, error)) error {
	req, err := recv()
	if err != nil {
		return err
	}
	c := w.find(value(req.GetRequestHeaders().GetHeaders(), ":path"))
	if c == nil {
		return errors.New("the ext_proc server got an unknown call")
	}
	w.track(st.Context(), c, value(req.GetRequestHeaders().GetHeaders(), "x-request-id"))
	defer c.set(hungUp)
	for {
		resp, is := pass(req, w.mode == duplex)
		c.seen = append(c.seen, is...)
		if slices.Contains(is, c.quitAt) {
			return c.quit(st)
		}
		if err := w.reply(c, st, resp, is); err != nil {
			c.ended = err
			return err
		}
		if req, err = recv(); err != nil {
			if c.ended = err; err == io.EOF {
				return nil
			}
			return err
		}
	}
}

// reply replies to a message when the call's plan says so.
func (w *world) reply(c *call, st process, resp *response, to []mark) error {
	for _, m := range to {
		c.set(m)
	}
	if slices.Contains(to, c.hold) {
		c.set(holding)
		w.wait(c.resume)
	}
	if err := st.Send(resp); err != nil {
		return err
	}
	for _, m := range to {
		c.set(replied(m))
	}
	if slices.Contains(to, c.busy) {
		c.set(isBusy)
		w.wait(c.look)
	}
	return nil
}

func (w *world) wait(c <-chan struct{}) {
	select {
	case <-c:
	case <-w.Context().Done(): // the test has failed
	}
}

// track has the evictor know the call.
func (w *world) track(ctx context.Context, c *call, id string) {
	c.handle = abort.FromContext(ctx)
	w.mu.Lock()
	w.handles[c.handle] = c
	w.mu.Unlock()
	req := c.request
	req.ID, req.Endpoint = id, c.uri
	w.ev.TrackRequests(ctx, req)
	c.set(tracked)
}

// pass returns the reply that changes nothing, and what it replies to.
func pass(req *request, duplex bool) (*response, []mark) {
	body := func(b *extprocpb.HttpBody) *extprocpb.BodyResponse {
		if !duplex {
			return &extprocpb.BodyResponse{}
		}
		return &extprocpb.BodyResponse{Response: &extprocpb.CommonResponse{BodyMutation: &extprocpb.BodyMutation{
			Mutation: &extprocpb.BodyMutation_StreamedResponse{StreamedResponse: &extprocpb.StreamedBodyResponse{
				Body: b.GetBody(), EndOfStream: b.GetEndOfStream(),
			}},
		}}}
	}
	marks := func(m, atEnd mark, end bool) []mark {
		if end {
			return []mark{m, atEnd}
		}
		return []mark{m}
	}
	headers, trailers := &extprocpb.HeadersResponse{}, &extprocpb.TrailersResponse{}
	switch r := req.GetRequest().(type) {
	case *extprocpb.ProcessingRequest_RequestHeaders:
		return &response{Response: &extprocpb.ProcessingResponse_RequestHeaders{RequestHeaders: headers}},
			marks(requestHeaders, requestEnd, r.RequestHeaders.GetEndOfStream())
	case *extprocpb.ProcessingRequest_RequestBody:
		return &response{Response: &extprocpb.ProcessingResponse_RequestBody{RequestBody: body(r.RequestBody)}},
			marks(requestBody, requestEnd, r.RequestBody.GetEndOfStream())
	case *extprocpb.ProcessingRequest_RequestTrailers:
		return &response{Response: &extprocpb.ProcessingResponse_RequestTrailers{RequestTrailers: trailers}},
			marks(requestTrailers, requestEnd, true)
	case *extprocpb.ProcessingRequest_ResponseHeaders:
		return &response{Response: &extprocpb.ProcessingResponse_ResponseHeaders{ResponseHeaders: headers}},
			marks(responseHeaders, responseEnd, r.ResponseHeaders.GetEndOfStream())
	case *extprocpb.ProcessingRequest_ResponseBody:
		return &response{Response: &extprocpb.ProcessingResponse_ResponseBody{ResponseBody: body(r.ResponseBody)}},
			marks(responseBody, responseEnd, r.ResponseBody.GetEndOfStream())
	}
	return &response{Response: &extprocpb.ProcessingResponse_ResponseTrailers{ResponseTrailers: trailers}},
		marks(responseTrailers, responseEnd, true)
}

func value(h *corepb.HeaderMap, name string) string {
	for _, v := range h.GetHeaders() {
		if v.GetKey() == name {
			return string(v.GetRawValue())
		}
	}
	return ""
}
