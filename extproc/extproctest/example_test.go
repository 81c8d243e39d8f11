package extproctest_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"

	"github.com/extevict/extevict/extproc/extproctest"
)

// picker answers every message, but for the second chunk of a response: there it evicts the request.
type picker struct{}

func (picker) Process(st extprocpb.ExternalProcessor_ProcessServer) error {
	for chunks := 0; ; {
		req, err := st.Recv()
		if err != nil {
			return nil // the request is over
		}
		res := new(extprocpb.ProcessingResponse)
		switch req.Request.(type) {
		case *extprocpb.ProcessingRequest_RequestHeaders:
			res.Response = &extprocpb.ProcessingResponse_RequestHeaders{}
		case *extprocpb.ProcessingRequest_ResponseHeaders:
			res.Response = &extprocpb.ProcessingResponse_ResponseHeaders{}
		case *extprocpb.ProcessingRequest_ResponseBody:
			res.Response = &extprocpb.ProcessingResponse_ResponseBody{}
			if chunks++; chunks == 2 {
				res.Response = &extprocpb.ProcessingResponse_ImmediateResponse{ImmediateResponse: &extprocpb.ImmediateResponse{
					Status:  &typepb.HttpStatus{Code: typepb.StatusCode_TooManyRequests},
					Details: "evicted",
				}}
			}
		}
		if err := st.Send(res); err != nil {
			return err
		}
	}
}

// An ext_proc server between an HTTP client and a model, without an Envoy or a network.
func Example() {
	model := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for i := 0; r.Context().Err() == nil; i++ {
			fmt.Fprintf(w, "data: token %d\n\n", i)
			w.(http.Flusher).Flush()
		}
		fmt.Println("the model stops")
	})
	logged := make(chan extproctest.Entry, 1)
	envoy := &extproctest.Envoy{
		Server:   picker{},
		Upstream: extproctest.Handler(model),
		Config: &filterpb.ExternalProcessor{ProcessingMode: &filterpb.ProcessingMode{
			ResponseBodyMode: filterpb.ProcessingMode_STREAMED,
		}},
		AccessLog: func(e extproctest.Entry) { logged <- e },
	}
	client := &http.Client{Transport: envoy}

	res, err := client.Get("http://gateway/v1/completions")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer res.Body.Close()
	_, err = io.ReadAll(res.Body)
	fmt.Println(res.StatusCode, errors.Is(err, extproctest.ErrReset))
	e := <-logged
	fmt.Println(e.Code, e.Details)
	// Unordered output:
	// the model stops
	// 200 true
	// 200 evicted
}

// The layer below Envoy: a test that sends the messages itself.
func ExampleStream() {
	st := extproctest.NewStream(context.Background(), 1)
	done := make(chan error)
	go func() { done <- st.Serve(picker{}) }()

	st.Push(&extprocpb.ProcessingRequest{Request: &extprocpb.ProcessingRequest_RequestHeaders{}})
	fmt.Printf("%T\n", (<-st.Replies()).Response)
	st.HangUp()
	fmt.Println(<-done)
	// Output:
	// *ext_procv3.ProcessingResponse_RequestHeaders
	// <nil>
}
