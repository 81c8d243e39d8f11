package main

import (
	"context"
	"fmt"
	"math"
	"net"
	"strings"
	"sync/atomic"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
)

// This is the file to copy. All that makes an ext_proc server evict is in newServer,
// makeRoom and the call of TrackRequests.

// A picker is an endpoint picker: an ext_proc server that sends each request to an
// engine. There is one engine here; when that is full, a request evicts one that
// matters less.
type picker struct {
	extprocpb.UnimplementedExternalProcessorServer
	endpoint   string         // ip:port of the engine
	priorities map[string]int // by API key
	slots      atomic.Int64   // how many requests the engine runs at once; 0: never evict
	evictor    evictor.Evictor
}

// newServer returns p as a server whose requests can be evicted.
func (p *picker) newServer(opts ...extproc.Option) extprocpb.ExternalProcessorServer {
	return extproc.Wrap(p, opts...)
}

// listenAndServe serves the protocol that Envoy speaks, until the server is stopped.
func listenAndServe(p extprocpb.ExternalProcessorServer) (*grpc.Server, net.Addr, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, nil, err
	}
	s := grpc.NewServer()
	extprocpb.RegisterExternalProcessorServer(s, p)
	go s.Serve(l) // ends with s.Stop
	return s, l.Addr(), nil
}

// Process serves one request, from its headers to the end of its response. It knows
// nothing of evictions: to it an evicted request is a client that left.
func (p *picker) Process(st extprocpb.ExternalProcessor_ProcessServer) error {
	var bodyMode filterpb.ProcessingMode_BodySendMode
	for {
		req, err := st.Recv()
		if err != nil {
			return err
		}
		if c := req.GetProtocolConfig(); c != nil { // in the first message
			bodyMode = c.GetResponseBodyMode()
		}
		resp := new(extprocpb.ProcessingResponse)
		switch r := req.Request.(type) {
		case *extprocpb.ProcessingRequest_RequestHeaders:
			resp.Response = &extprocpb.ProcessingResponse_RequestHeaders{RequestHeaders: p.pick(st.Context(), r.RequestHeaders)}
		case *extprocpb.ProcessingRequest_ResponseHeaders:
			resp.Response = &extprocpb.ProcessingResponse_ResponseHeaders{ResponseHeaders: new(extprocpb.HeadersResponse)}
		case *extprocpb.ProcessingRequest_ResponseBody:
			resp.Response = &extprocpb.ProcessingResponse_ResponseBody{ResponseBody: pass(r.ResponseBody, bodyMode)}
		case *extprocpb.ProcessingRequest_ResponseTrailers:
			resp.Response = &extprocpb.ProcessingResponse_ResponseTrailers{ResponseTrailers: new(extprocpb.TrailersResponse)}
		default:
			return fmt.Errorf("unexpected %T: check the filter's processing_mode", r)
		}
		if err := st.Send(resp); err != nil {
			return err
		}
	}
}

// pick names the endpoint of a request and makes room for it there.
func (p *picker) pick(ctx context.Context, h *extprocpb.HttpHeaders) *extprocpb.HeadersResponse {
	// The priority follows from who the client is, not from what it says: a client that
	// could name its own priority would never be evicted, and would evict others at
	// will. So never read it from a header, unless your gateway overwrites that header in
	// each request. The key is checked here; if a filter before this one does it
	// (jwt_authn, ext_authz), use what that filter found out.
	priority, known := p.priorities[strings.TrimPrefix(header(h, "authorization"), "Bearer ")]
	if !known {
		priority = math.MinInt
	}
	p.makeRoom(ctx, priority)

	// From here to its end the request may be evicted itself.
	p.evictor.TrackRequests(ctx, abort.Request{ID: header(h, "x-request-id"), Priority: priority, Endpoint: p.endpoint})

	return &extprocpb.HeadersResponse{Response: &extprocpb.CommonResponse{HeaderMutation: &extprocpb.HeaderMutation{
		SetHeaders: []*corepb.HeaderValueOption{{
			Header:       &corepb.HeaderValue{Key: "x-gateway-destination-endpoint", RawValue: []byte(p.endpoint)},
			AppendAction: corepb.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD, // whatever the client sent
		}},
	}}}
}

// makeRoom evicts one request for one that matters more, if the engine is full by the
// picker's own count. It is a policy to begin with: it doesn't wait until the capacity
// is back, doesn't ask how much is needed, and evicts again for each arrival.
func (p *picker) makeRoom(ctx context.Context, priority int) {
	if slots := int(p.slots.Load()); slots == 0 || p.evictor.Len() < slots {
		return
	}
	// It fails only if an Aborter does, of which there is none here, or with ctx: then
	// there is nobody left to make room for.
	p.evictor.Evict(ctx, evictor.Demand{N: 1, Below: priority, Endpoint: p.endpoint, Reason: abort.Preempted})
}

// pass lets a part of the response's body through. In FULL_DUPLEX_STREAMED the client
// gets only what the server sends.
func pass(b *extprocpb.HttpBody, mode filterpb.ProcessingMode_BodySendMode) *extprocpb.BodyResponse {
	if mode != filterpb.ProcessingMode_FULL_DUPLEX_STREAMED {
		return new(extprocpb.BodyResponse)
	}
	return &extprocpb.BodyResponse{Response: &extprocpb.CommonResponse{BodyMutation: &extprocpb.BodyMutation{
		Mutation: &extprocpb.BodyMutation_StreamedResponse{StreamedResponse: &extprocpb.StreamedBodyResponse{
			Body: b.GetBody(), EndOfStream: b.GetEndOfStream(),
		}},
	}}}
}

// header returns the value of the first header with that name, or "".
func header(h *extprocpb.HttpHeaders, name string) string {
	for _, v := range h.GetHeaders().GetHeaders() {
		if v.GetKey() == name {
			return string(v.GetRawValue()) // Envoy leaves Value empty
		}
	}
	return ""
}
