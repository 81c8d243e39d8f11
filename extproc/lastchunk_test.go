package extproc_test

import (
	"context"
	"io"
	"sync"
	"testing"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
)

// lastChunk is a stream on which the last chunk of a response comes while the request
// is aborted.
type lastChunk struct {
	extprocpb.ExternalProcessor_ProcessServer
	ctx    context.Context
	reqs   []*extprocpb.ProcessingRequest
	before func() // runs as the last of reqs is received
	hungUp chan struct{}

	mu   sync.Mutex // guards the rest
	sent []*extprocpb.ProcessingResponse
}

func (s *lastChunk) Context() context.Context { return s.ctx }

func (s *lastChunk) Recv() (*extprocpb.ProcessingRequest, error) {
	if len(s.reqs) == 0 {
		<-s.hungUp
		return nil, io.EOF
	}
	req := s.reqs[0]
	s.reqs = s.reqs[1:]
	if len(s.reqs) == 0 {
		s.before()
	}
	return req, nil
}

func (s *lastChunk) Send(r *extprocpb.ProcessingResponse) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = append(s.sent, r)
	b := r.GetResponseBody()
	if r.GetImmediateResponse() != nil || b != nil && len(s.sent) == 4 {
		select {
		case <-s.hungUp:
		default:
			close(s.hungUp)
		}
	}
	return nil
}

type processFunc func(extprocpb.ExternalProcessor_ProcessServer) error

func (f processFunc) Process(st extprocpb.ExternalProcessor_ProcessServer) error { return f(st) }

// TestLastChunkIsNotOwed aborts as the last chunk is received: an error event in the
// reply to it would end the client's response as if it were complete.
func TestLastChunkIsNotOwed(t *testing.T) {
	header := func(k, v string) *extprocpb.HttpHeaders {
		return &extprocpb.HttpHeaders{Headers: &corepb.HeaderMap{Headers: []*corepb.HeaderValue{{Key: k, RawValue: []byte(v)}}}}
	}
	reqs := []*extprocpb.ProcessingRequest{
		{
			Request:        &extprocpb.ProcessingRequest_RequestHeaders{RequestHeaders: header(":path", "/")},
			ProtocolConfig: &extprocpb.ProtocolConfiguration{ResponseBodyMode: filterpb.ProcessingMode_STREAMED},
		},
		{Request: &extprocpb.ProcessingRequest_ResponseHeaders{ResponseHeaders: header("content-type", "text/event-stream")}},
		{Request: &extprocpb.ProcessingRequest_ResponseBody{ResponseBody: &extprocpb.HttpBody{Body: []byte("data: 1\n\n")}}},
		{Request: &extprocpb.ProcessingRequest_ResponseBody{ResponseBody: &extprocpb.HttpBody{EndOfStream: true}}},
	}
	srv := extproc.Wrap(processFunc(func(st extprocpb.ExternalProcessor_ProcessServer) error {
		for {
			req, err := st.Recv()
			if err != nil {
				return err
			}
			resp := &extprocpb.ProcessingResponse{}
			switch req.Request.(type) {
			case *extprocpb.ProcessingRequest_RequestHeaders:
				resp.Response = &extprocpb.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocpb.HeadersResponse{}}
			case *extprocpb.ProcessingRequest_ResponseHeaders:
				resp.Response = &extprocpb.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocpb.HeadersResponse{}}
			case *extprocpb.ProcessingRequest_ResponseBody:
				resp.Response = &extprocpb.ProcessingResponse_ResponseBody{ResponseBody: &extprocpb.BodyResponse{}}
			}
			if err := st.Send(resp); err != nil {
				return err
			}
		}
	}), extproc.WithTracker(tracking(nil), func(context.Context, *extprocpb.ProcessingRequest) (abort.Request, bool) {
		return abort.Request{}, true
	}))
	aborted := 0
	for i := range 20_000 {
		handles := make(chan *abort.Handle, 1)
		var wg sync.WaitGroup
		st := &lastChunk{ctx: context.WithValue(context.Background(), key{}, handles), reqs: reqs, hungUp: make(chan struct{})}
		st.before = func() {
			h := <-handles
			ready := make(chan struct{})
			wg.Go(func() {
				close(ready)
				for range i % 64 { // spread the abort over what follows
				}
				h.Abort(abort.Preempted)
			})
			<-ready
		}
		srv.Process(st)
		wg.Wait()
		st.mu.Lock()
		sent := st.sent
		st.mu.Unlock()
		bodies := 0
		for _, r := range sent {
			if r.GetResponseBody() != nil {
				bodies++
			}
		}
		if sent[len(sent)-1].GetImmediateResponse() == nil {
			continue
		}
		if aborted++; bodies > 1 {
			t.Fatalf("round %d: the error event is in the reply to the last chunk: %v", i, sent[3:])
		}
	}
	t.Logf("%d aborted", aborted)
}

// key is that of the channel that a tracking sends the stream's handle to.
type key struct{}

type tracking []int

func (tracking) TrackRequests(ctx context.Context, _ ...abort.Request) {
	ctx.Value(key{}).(chan *abort.Handle) <- abort.FromContext(ctx)
}
