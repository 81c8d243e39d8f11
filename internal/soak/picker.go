package main

import (
	"context"
	"errors"
	"io"
	"time"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/flowcontrol"
	"github.com/extevict/extevict/internal/envoy"
)

// The places where the picker may panic.
var places = []string{"headers", "admitted", "response headers", "response body"}

var errPanic = errors.New("a panic, as planned")

// refusal is the header that tells the picker's own refusals from evictions.
const refusal = "x-refused"

// A picker is the ext_proc server that sends a request where the Pool has room.
type picker struct {
	extprocpb.UnimplementedExternalProcessorServer
	gateway *gateway
}

// Process serves one request.
func (p *picker) Process(st extprocpb.ExternalProcessor_ProcessServer) error {
	a := p.gateway.account
	booked := a.open(abort.FromContext(st.Context()))
	var r *request
	var config *extprocpb.ProtocolConfiguration
	for {
		req, err := st.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		if c := req.GetProtocolConfig(); c != nil {
			config = c
		}
		if h := req.GetRequestHeaders(); h != nil {
			if r = a.name(booked, value(h, envoy.CaseHeader)); r == nil {
				return errors.New("an unknown request")
			}
			p.panicAt("headers", r)
		}
		resp := new(extprocpb.ProcessingResponse)
		switch m := req.Request.(type) {
		case *extprocpb.ProcessingRequest_RequestHeaders:
			if resp, err = p.pick(st.Context(), r); err != nil {
				return err
			}
			p.panicAt("admitted", r)
		case *extprocpb.ProcessingRequest_RequestBody:
			resp.Response = &extprocpb.ProcessingResponse_RequestBody{RequestBody: pass(m.RequestBody, config.GetRequestBodyMode())}
		case *extprocpb.ProcessingRequest_RequestTrailers:
			resp.Response = &extprocpb.ProcessingResponse_RequestTrailers{RequestTrailers: new(extprocpb.TrailersResponse)}
		case *extprocpb.ProcessingRequest_ResponseHeaders:
			p.panicAt("response headers", r)
			resp.Response = &extprocpb.ProcessingResponse_ResponseHeaders{ResponseHeaders: new(extprocpb.HeadersResponse)}
		case *extprocpb.ProcessingRequest_ResponseBody:
			p.panicAt("response body", r)
			resp.Response = &extprocpb.ProcessingResponse_ResponseBody{ResponseBody: pass(m.ResponseBody, config.GetResponseBodyMode())}
		case *extprocpb.ProcessingRequest_ResponseTrailers:
			resp.Response = &extprocpb.ProcessingResponse_ResponseTrailers{ResponseTrailers: new(extprocpb.TrailersResponse)}
		}
		if err := st.Send(resp); err != nil {
			return err
		}
	}
}

func (p *picker) panicAt(place string, r *request) {
	if r.panics == place {
		p.gateway.account.change(func() { r.panicked = true; p.gateway.account.counts["panics"]++ })
		panic(errPanic)
	}
}

// pick waits for room and names the engine that has it.
func (p *picker) pick(ctx context.Context, r *request) (*extprocpb.ProcessingResponse, error) {
	a := p.gateway.account
	lease, err := p.gateway.pool.Admit(ctx, flowcontrol.Request{ID: r.id, Key: r.name, Priority: r.priority,
		Tokens: int64(r.prompt), TTFT: 200 * time.Millisecond, Evictions: r.evictions})
	_, overloaded := errors.AsType[*flowcontrol.OverloadedError](err)
	switch {
	case overloaded || errors.Is(err, flowcontrol.ErrInfeasible):
		a.change(func() { r.refused = true })
		return &extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocpb.ImmediateResponse{
			Status: &typepb.HttpStatus{Code: typepb.StatusCode_TooManyRequests}, Headers: set(refusal, "yes"), Details: "refused",
		}}}, nil
	case err != nil:
		return nil, err
	}
	a.change(func() { r.endpoint = lease.Endpoint() })
	return &extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocpb.HeadersResponse{
		Response: &extprocpb.CommonResponse{HeaderMutation: set(envoy.EndpointHeader, lease.Endpoint())},
	}}}, nil
}

func set(name, v string) *extprocpb.HeaderMutation {
	return &extprocpb.HeaderMutation{SetHeaders: []*corepb.HeaderValueOption{{
		Header:       &corepb.HeaderValue{Key: name, RawValue: []byte(v)},
		AppendAction: corepb.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
	}}}
}

// pass lets a part of a body through.
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

func value(h *extprocpb.HttpHeaders, name string) string {
	for _, v := range h.GetHeaders().GetHeaders() {
		if v.GetKey() == name {
			return string(v.GetRawValue())
		}
	}
	return ""
}
