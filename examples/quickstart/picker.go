package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync/atomic"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc"

	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/flowcontrol"
)

// This is the file to copy. All that makes an ext_proc server admit requests by priority
// and evict is in newServer, newPool and the call of Admit; refuse puts its errors into
// HTTP.

// A picker is an endpoint picker: an ext_proc server that sends each request to an
// engine. There is one engine here; when that is full, a request waits until there is
// room, or evicts one that matters less.
type picker struct {
	extprocpb.UnimplementedExternalProcessorServer
	priorities map[string]int // by API key
	evictor    evictor.Evictor
	pool       atomic.Pointer[flowcontrol.Pool] // each act has its own; yours has one for good
}

// newServer returns p as a server whose requests can be evicted.
func (p *picker) newServer(opts ...extproc.Option) extprocpb.ExternalProcessorServer {
	return extproc.Wrap(p, opts...)
}

// newPool has p admit requests to e from now on. Whoever scrapes e's metrics tells the
// Pool by Observe.
func (p *picker) newPool(e flowcontrol.Endpoint, opts ...flowcontrol.Option) *flowcontrol.Pool {
	pool := flowcontrol.NewPool(&p.evictor, opts...) // evicts nobody unless EvictBelow is among opts
	pool.SetEndpoint(e)
	p.pool.Store(pool)
	return pool
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
			if resp, err = p.pick(st.Context(), r.RequestHeaders); err != nil {
				return err
			}
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

// pick waits until there is room for a request, and names the endpoint where it is. Until
// then Envoy waits for its reply, which the filter's message_timeout must allow.
func (p *picker) pick(ctx context.Context, h *extprocpb.HttpHeaders) (*extprocpb.ProcessingResponse, error) {
	// The priority follows from who the client is, not from what it says: a client that
	// could name its own priority would never be evicted, and would evict others at
	// will. So never read it from a header, unless your gateway overwrites that header in
	// each request. The key is checked here; if a filter before this one does it
	// (jwt_authn, ext_authz), use what that filter found out.
	priority, known := p.priorities[strings.TrimPrefix(header(h, "authorization"), "Bearer ")]
	if !known {
		priority = math.MinInt
	}

	// From here to its end the request may be evicted itself. Its end, whichever it is,
	// gives the room back.
	lease, err := p.pool.Load().Admit(ctx, flowcontrol.Request{ID: header(h, "x-request-id"), Priority: priority, Tokens: promptTokens(h)})
	if err != nil {
		return refuse(err)
	}
	return &extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocpb.HeadersResponse{
		Response: &extprocpb.CommonResponse{HeaderMutation: &extprocpb.HeaderMutation{
			SetHeaders: []*corepb.HeaderValueOption{{
				Header:       &corepb.HeaderValue{Key: "x-gateway-destination-endpoint", RawValue: []byte(lease.Endpoint())},
				AppendAction: corepb.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD, // whatever the client sent
			}},
		}},
	}}}, nil
}

// refuse answers a request that was not admitted. An error is of one that is over: its
// client has left, or somebody has aborted it while it waited.
func refuse(err error) (*extprocpb.ProcessingResponse, error) {
	answer := &extprocpb.ImmediateResponse{Body: []byte(err.Error()), Details: "not_admitted"}
	if e, ok := errors.AsType[*flowcontrol.OverloadedError](err); ok {
		answer.Status = &typepb.HttpStatus{Code: http.StatusTooManyRequests}
		answer.Headers = &extprocpb.HeaderMutation{SetHeaders: []*corepb.HeaderValueOption{{
			Header: &corepb.HeaderValue{Key: "retry-after", RawValue: strconv.AppendInt(nil, int64(e.RetryAfter.Seconds()), 10)},
		}}}
	} else if errors.Is(err, flowcontrol.ErrInfeasible) { // if your endpoints come and go: 503 while there are none
		answer.Status = &typepb.HttpStatus{Code: http.StatusRequestEntityTooLarge}
	} else {
		return nil, err
	}
	return &extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_ImmediateResponse{ImmediateResponse: answer}}, nil
}

// promptTokens guesses how many tokens a prompt has, from the bytes of the body that
// this server doesn't see. 0 is unknown.
func promptTokens(h *extprocpb.HttpHeaders) int64 {
	bytes, err := strconv.ParseInt(header(h, "content-length"), 10, 64)
	if err != nil {
		return 0
	}
	return bytes / 4
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
