package extproc_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	corepb "github.com/envoyproxy/go-control-plane/envoy/config/core/v3"
	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	typepb "github.com/envoyproxy/go-control-plane/envoy/type/v3"
	"google.golang.org/grpc"
	"google.golang.org/grpc/metadata"

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

// A server that owns its loop needs no type of its own.
func ExampleHandler() {
	srv := extproc.Handler(func(st *extproc.Stream) error {
		for {
			req, err := st.Recv()
			if err != nil {
				return nil // the request is over: answered, left or evicted
			}
			if err := st.Send(reply(req)); err != nil {
				return err
			}
		}
	})
	extprocpb.RegisterExternalProcessorServer(grpc.NewServer(), srv)
}

// Clients that should not try again at once are told so.
func ExampleWithResponse() {
	extproc.Wrap(yours, extproc.WithResponse(func(e *abort.Error, rs []abort.Request) *extprocpb.ImmediateResponse {
		r := extproc.Response(e, rs)
		r.Status.Code = typepb.StatusCode_ServiceUnavailable
		r.Headers.SetHeaders = append(r.Headers.SetHeaders, &corepb.HeaderValueOption{
			Header:       &corepb.HeaderValue{Key: "retry-after", RawValue: []byte("30")},
			AppendAction: corepb.HeaderValueOption_OVERWRITE_IF_EXISTS_OR_ADD,
		})
		return r
	}))
}

// Clients of an API that is not OpenAI's get an error event of their own kind.
func ExampleWithErrorEvent() {
	extproc.Wrap(yours, extproc.WithErrorEvent(extproc.ErrorEvent{
		Event: func(e *abort.Error, _ []abort.Request) []byte {
			return fmt.Appendf(nil, "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":%q}}\n\n", e.Reason.String())
		},
		Wait: 50 * time.Millisecond, // for the next chunk, in STREAMED
	}))
}

// An admin API finds requests by the id that Envoy gave them.
func ExampleWithRegistry() {
	var registry abort.Registry
	extproc.Wrap(yours, extproc.WithRegistry(&registry))
	http.HandleFunc("POST /abort/{id}", func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintln(w, registry.Abort(r.PathValue("id"), abort.Canceled), "aborted")
	})
}

// The server's own code gets no context, so that the wrapper tracks its requests: by a
// priority that the route sets, not the client.
func ExampleWithTracker() {
	ev := evictor.New()
	extproc.Wrap(yours, extproc.WithTracker(ev, func(ctx context.Context, req *extprocpb.ProcessingRequest) (abort.Request, bool) {
		md, _ := metadata.FromIncomingContext(ctx) // of grpc_service.initial_metadata
		if len(md["x-tier"]) == 0 {
			return abort.Request{}, false // a filter whose requests are not to be evicted
		}
		priority := 0
		if md["x-tier"][0] == "batch" {
			priority = -1
		}
		return abort.Request{Priority: priority}, true
	}))
}

// A request-only server stays evictable in every phase behind a filter with
// allow_mode_override: true.
func ExampleWithKeepalive() {
	extproc.Wrap(yours, extproc.WithKeepalive())
}
