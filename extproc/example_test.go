package extproc_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"google.golang.org/grpc"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/extproc/extproctest"
)

// yours stands for an existing ext_proc server, model for the upstream that it picks.
var (
	yours extprocpb.ExternalProcessorServer = echo(none)
	model                                   = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		arrived <- struct{}{}
		<-r.Context().Done() // it never answers
	})
	arrived = make(chan struct{}, 1)
)

// A test against a fake of Envoy: a request waits for a model that never answers, and
// is evicted.
func ExampleWrap() {
	ev := evictor.New()
	envoy := &extproctest.Envoy{
		Server: extproc.Wrap(yours, extproc.WithTracker(ev, func(context.Context, *extprocpb.ProcessingRequest) (abort.Request, bool) {
			return abort.Request{Priority: -1}, true
		})),
		Upstream: extproctest.Handler(model),
		Config: &filterpb.ExternalProcessor{ProcessingMode: &filterpb.ProcessingMode{
			ResponseTrailerMode: filterpb.ProcessingMode_SEND, // keeps the stream open
		}},
	}
	go func() {
		<-arrived
		ev.Evict(context.Background(), evictor.Demand{N: 1, Below: 0, Reason: abort.Preempted})
	}()

	client := &http.Client{Transport: envoy}
	resp, err := client.Get("http://model/v1/completions")
	if err != nil {
		panic(err)
	}
	defer resp.Body.Close()
	fmt.Println(resp.StatusCode, resp.Header.Get("x-evicted-reason"))
	// Output: 429 preempted
}

// A server that registers itself with grpc takes the interceptor as an option. Recovery
// stands before it, so that it sees the server's panics as ever.
func ExampleStreamInterceptor() {
	var registry abort.Registry
	s := grpc.NewServer(grpc.ChainStreamInterceptor(
		// recovery, logging, metrics
		extproc.StreamInterceptor(extproc.WithRegistry(&registry)),
	))
	extprocpb.RegisterExternalProcessorServer(s, yours)
}

// A server that owns its loop learns of an abort at once.
func ExampleStream_RecvOrAbort() {
	serve := func(st *extproc.Stream) error {
		for {
			req, err := st.RecvOrAbort()
			if e, ok := errors.AsType[*abort.Error](err); ok {
				fmt.Println("evicted:", e.Reason)
				return nil // Envoy has its answer
			}
			if err == io.EOF {
				return nil
			}
			if err != nil {
				return err
			}
			if err := st.Send(reply(req)); err != nil {
				return err
			}
		}
	}
	s := grpc.NewServer()
	extprocpb.RegisterExternalProcessorServer(s, extproc.Handler(serve))
}

// An observer gets what a metric or a log line needs.
func ExampleWithObserver() {
	extproc.Wrap(yours, extproc.WithObserver(func(e extproc.Event) {
		if e.Outcome == abort.Aborted {
			fmt.Println(e.Handle.Err(), e.Phase, e.Answer, e.Answered.Sub(e.Settled))
		}
	}))
}
