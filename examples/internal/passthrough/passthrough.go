// Package passthrough stands for your ext_proc server in the examples: it lets
// everything pass.
package passthrough

import (
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
)

// Server answers every message with nothing to change, in the body modes NONE,
// STREAMED and BUFFERED.
type Server struct {
	extprocpb.UnimplementedExternalProcessorServer
}

// Process implements extprocpb.ExternalProcessorServer.
func (Server) Process(st extprocpb.ExternalProcessor_ProcessServer) error {
	for {
		req, err := st.Recv()
		if err != nil {
			return err
		}
		if err := st.Send(Reply(req)); err != nil {
			return err
		}
	}
}

// Reply is the answer that changes nothing.
func Reply(req *extprocpb.ProcessingRequest) *extprocpb.ProcessingResponse {
	switch req.Request.(type) {
	case *extprocpb.ProcessingRequest_RequestHeaders:
		return &extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocpb.HeadersResponse{}}}
	case *extprocpb.ProcessingRequest_RequestBody:
		return &extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_RequestBody{RequestBody: &extprocpb.BodyResponse{}}}
	case *extprocpb.ProcessingRequest_RequestTrailers:
		return &extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_RequestTrailers{RequestTrailers: &extprocpb.TrailersResponse{}}}
	case *extprocpb.ProcessingRequest_ResponseHeaders:
		return &extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocpb.HeadersResponse{}}}
	case *extprocpb.ProcessingRequest_ResponseBody:
		return &extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_ResponseBody{ResponseBody: &extprocpb.BodyResponse{}}}
	}
	return &extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extprocpb.TrailersResponse{}}}
}
