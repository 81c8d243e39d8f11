package extproc_test

import (
	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"github.com/extevict/extevict/abort"
)

// What Envoy sends and servers reply, shared by this package's tests.

const (
	none     = filterpb.ProcessingMode_NONE
	streamed = filterpb.ProcessingMode_STREAMED
	buffered = filterpb.ProcessingMode_BUFFERED
	duplex   = filterpb.ProcessingMode_FULL_DUPLEX_STREAMED
)

type (
	request  = extprocpb.ProcessingRequest
	response = extprocpb.ProcessingResponse
	process  = extprocpb.ExternalProcessor_ProcessServer
	mode     = filterpb.ProcessingMode_BodySendMode
)

// serverFunc is a server of one function.
type serverFunc func(process) error

func (f serverFunc) Process(st process) error { return f(st) }

// headers makes a map of name, value, name, value...
func headers(kv ...string) *corepb.HeaderMap {
	m := &corepb.HeaderMap{}
	for i := 0; i < len(kv); i += 2 {
		m.Headers = append(m.Headers, &corepb.HeaderValue{Key: kv[i], RawValue: []byte(kv[i+1])})
	}
	return m
}

func requestHeaders(m mode, kv ...string) *request {
	return &request{
		ProtocolConfig: &extprocpb.ProtocolConfiguration{RequestBodyMode: m, ResponseBodyMode: m},
		Request:        &extprocpb.ProcessingRequest_RequestHeaders{RequestHeaders: &extprocpb.HttpHeaders{Headers: headers(kv...), EndOfStream: true}},
	}
}

func responseHeaders(kv ...string) *request {
	if len(kv) == 0 {
		kv = []string{":status", "200", "content-type", "text/event-stream"}
	}
	return &request{Request: &extprocpb.ProcessingRequest_ResponseHeaders{ResponseHeaders: &extprocpb.HttpHeaders{Headers: headers(kv...)}}}
}

func responseBody(b string, end bool) *request {
	return &request{Request: &extprocpb.ProcessingRequest_ResponseBody{ResponseBody: &extprocpb.HttpBody{Body: []byte(b), EndOfStream: end}}}
}

func responseTrailers() *request {
	return &request{Request: &extprocpb.ProcessingRequest_ResponseTrailers{ResponseTrailers: &extprocpb.HttpTrailers{}}}
}

// reply answers a message with nothing to change, as most servers do.
func reply(r *request) *response { return replyIn(streamed, r) }

// replyIn is reply in a body mode: in FULL_DUPLEX_STREAMED a server hands the bytes back.
func replyIn(m mode, r *request) *response {
	body := func(b *extprocpb.HttpBody) *extprocpb.BodyResponse {
		if m != duplex {
			return &extprocpb.BodyResponse{}
		}
		return streamedBody(string(b.GetBody()), b.GetEndOfStream())
	}
	switch q := r.GetRequest().(type) {
	case *extprocpb.ProcessingRequest_RequestHeaders:
		return &response{Response: &extprocpb.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocpb.HeadersResponse{}}}
	case *extprocpb.ProcessingRequest_RequestBody:
		return &response{Response: &extprocpb.ProcessingResponse_RequestBody{RequestBody: body(q.RequestBody)}}
	case *extprocpb.ProcessingRequest_RequestTrailers:
		return &response{Response: &extprocpb.ProcessingResponse_RequestTrailers{RequestTrailers: &extprocpb.TrailersResponse{}}}
	case *extprocpb.ProcessingRequest_ResponseHeaders:
		return &response{Response: &extprocpb.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocpb.HeadersResponse{}}}
	case *extprocpb.ProcessingRequest_ResponseBody:
		return &response{Response: &extprocpb.ProcessingResponse_ResponseBody{ResponseBody: body(q.ResponseBody)}}
	}
	return &response{Response: &extprocpb.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extprocpb.TrailersResponse{}}}
}

func streamedBody(b string, end bool) *extprocpb.BodyResponse {
	return &extprocpb.BodyResponse{Response: &extprocpb.CommonResponse{BodyMutation: &extprocpb.BodyMutation{
		Mutation: &extprocpb.BodyMutation_StreamedResponse{StreamedResponse: &extprocpb.StreamedBodyResponse{Body: []byte(b), EndOfStream: end}}}}}
}

func immediate(details string) *response {
	return &response{Response: &extprocpb.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocpb.ImmediateResponse{Details: details}}}
}

// echo answers every message until the stream ends.
func echo(m mode) serverFunc {
	return func(st process) error {
		for {
			r, err := st.Recv()
			if err != nil {
				return nil
			}
			if err := st.Send(replyIn(m, r)); err != nil {
				return err
			}
		}
	}
}

// handle is the Handle of a stream's request.
func handle(st process) *abort.Handle { return abort.FromContext(st.Context()) }

func processingMode(body mode) *filterpb.ProcessingMode {
	return &filterpb.ProcessingMode{ResponseBodyMode: body}
}

func unavailable() *response {
	return &response{Response: &extprocpb.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocpb.ImmediateResponse{
		Status: &typepb.HttpStatus{Code: typepb.StatusCode_ServiceUnavailable}}}}
}
