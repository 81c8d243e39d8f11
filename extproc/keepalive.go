package extproc

import (
	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/protobuf/proto"
)

// keepsAlive reports whether r is the reply in which WithKeepalive asks for response
// trailers. The caller has the turn to send.
func (s *Stream) keepsAlive(r *extprocpb.ProcessingResponse) bool {
	f := &s.facts
	if !s.opts.keepalive || r.GetRequestHeaders() == nil || r.GetModeOverride() != nil || f.has(letOn) ||
		!f.has(configured) || f.mode() != filterpb.ProcessingMode_NONE || f.requestMode() == filterpb.ProcessingMode_FULL_DUPLEX_STREAMED {
		return false
	}
	f.set(asked)
	return true
}

// askForTrailers returns r with a mode_override that asks for response trailers. What
// is DEFAULT in an override stays as it is configured, but for body modes (measured on
// Envoy 1.40): the request's is copied.
func askForTrailers(r *extprocpb.ProcessingResponse, requestMode bodyMode) *extprocpb.ProcessingResponse {
	r = proto.CloneOf(r) // it is the server's, who may send it again
	r.ModeOverride = &filterpb.ProcessingMode{RequestBodyMode: requestMode, ResponseTrailerMode: filterpb.ProcessingMode_SEND}
	return r
}

// answerAsked answers trailers that only WithKeepalive has asked for, and reports
// whether req was that.
func (s *Stream) answerAsked(req *extprocpb.ProcessingRequest) bool {
	if _, ok := req.GetRequest().(*extprocpb.ProcessingRequest_ResponseTrailers); !ok {
		return false
	}
	// If the Send fails, the next Recv says why.
	s.Send(&extprocpb.ProcessingResponse{Response: &extprocpb.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extprocpb.TrailersResponse{}}})
	return true
}
