package otel

import (
	"context"

	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"go.opentelemetry.io/otel/trace"

	"github.com/extevict/extevict/abort"
)

// Annotate has the span of ctx get an event if ctx's request is aborted: "extevict.eviction",
// with the reason and the phase as extevict.eviction.reason and .phase. It comes at the time of
// the abort; what came of it is not known then, and Metrics count it. An event that comes after
// the span's end is lost, and without a request or a recording span in ctx nothing happens. Each
// call adds one event.
//
// The reason is as the aborter gave it: spans need no bound.
func Annotate(ctx context.Context) {
	span := trace.SpanFromContext(ctx)
	if !span.IsRecording() {
		return
	}
	h := abort.FromContext(ctx)
	h.OnSettle(func(abort.Outcome) {
		if e, ok := h.Err().(*abort.Error); ok {
			span.AddEvent("extevict.eviction", trace.WithAttributes(
				reasonKey.String(e.Reason.String()), phaseKey.String(h.Progress().Phase.String()),
			))
		}
	})
}

// Server returns next, with [Annotate] called for each stream's context: that of the ext_proc
// stream, whose span is one of grpc's instrumentation (otelgrpc) or an interceptor. It belongs
// inside extproc.Wrap, since only there the context has a request:
//
//	extproc.Wrap(otel.Server(yours))
//
// Servers that begin spans of their own, and those of extproc.Handler and
// extproc.StreamInterceptor, call Annotate. Server panics if next is nil.
func Server(next extprocpb.ExternalProcessorServer) extprocpb.ExternalProcessorServer {
	if next == nil {
		panic("otel: Server: nil server")
	}
	return server{next}
}

type server struct {
	extprocpb.ExternalProcessorServer
}

// Process implements [extprocpb.ExternalProcessorServer].
func (s server) Process(st extprocpb.ExternalProcessor_ProcessServer) error {
	Annotate(st.Context())
	return s.ExternalProcessorServer.Process(st)
}
