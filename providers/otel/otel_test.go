package otel_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/google/go-cmp/cmp"
	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/sdk/metric"
	"go.opentelemetry.io/otel/sdk/metric/metricdata"
	sdktrace "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"
	"go.opentelemetry.io/otel/trace"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/extproc/extproctest"
	"github.com/extevict/extevict/flowcontrol"
	"github.com/extevict/extevict/providers/otel"
)

// start returns Metrics and a function that collects their points by name, unit and attributes;
// of histograms, the count.
func start(t *testing.T, ev *evictor.Evictor) (*otel.Metrics, func() map[string]float64) {
	t.Helper()
	reader := metric.NewManualReader()
	m, err := otel.New(metric.NewMeterProvider(metric.WithReader(reader)).Meter("test"), ev)
	if err != nil {
		t.Fatal(err)
	}
	return m, func() map[string]float64 {
		t.Helper()
		var all metricdata.ResourceMetrics
		if err := reader.Collect(t.Context(), &all); err != nil {
			t.Fatal(err)
		}
		got := make(map[string]float64)
		for _, scope := range all.ScopeMetrics {
			for _, x := range scope.Metrics {
				put := func(a attribute.Set, v float64) {
					got[strings.TrimPrefix(x.Name, "extevict.")+" "+x.Unit+" "+strings.ReplaceAll(a.Encoded(attribute.DefaultEncoder()), "extevict.", "")] = v
				}
				if x.Description == "" {
					t.Errorf("%s has no description", x.Name)
				}
				switch d := x.Data.(type) {
				case metricdata.Sum[int64]:
					for _, p := range d.DataPoints {
						put(p.Attributes, float64(p.Value))
					}
				case metricdata.Sum[float64]:
					for _, p := range d.DataPoints {
						put(p.Attributes, p.Value)
					}
				case metricdata.Gauge[int64]:
					for _, p := range d.DataPoints {
						put(p.Attributes, float64(p.Value))
					}
				case metricdata.Gauge[float64]:
					for _, p := range d.DataPoints {
						put(p.Attributes, p.Value)
					}
				case metricdata.Histogram[float64]:
					for _, p := range d.DataPoints {
						put(p.Attributes, float64(p.Count))
					}
				default:
					t.Errorf("%s is a %T", x.Name, d)
				}
			}
		}
		return got
	}
}

// want compares the points that it names.
func want(t *testing.T, got, want map[string]float64) {
	t.Helper()
	some := make(map[string]float64)
	for k := range want {
		if v, ok := got[k]; ok {
			some[k] = v
		}
	}
	if d := cmp.Diff(want, some); d != "" {
		t.Errorf("points (-want +got):\n%s", d)
	}
}

// begin begins a request that ev tracks.
func begin(t *testing.T, ev *evictor.Evictor, priority int) *abort.Owner {
	own, ctx := abort.New(t.Context())
	t.Cleanup(own.Close)
	ev.TrackRequests(ctx, abort.Request{ID: "an-id", Priority: priority})
	return own
}

// await fails unless cond is true soon.
func await(t *testing.T, what string, cond func() bool) {
	t.Helper()
	for end := time.Now().Add(10 * time.Second); !cond(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("timeout: %s", what)
		}
	}
}

// TestActive: priorities come and go, and are bounded; after Close nothing is observed.
func TestActive(t *testing.T) {
	ev := evictor.New()
	m, collect := start(t, ev)
	a := begin(t, ev, -1)
	begin(t, ev, 7)
	want(t, collect(), map[string]float64{
		"active_requests {request} request.priority=-1": 1,
		"active_requests {request} request.priority=7":  1,
	})
	a.Close()
	var many []*abort.Owner
	for p := range 100 {
		many = append(many, begin(t, ev, 1000+p))
	}
	got := collect()
	want(t, got, map[string]float64{
		"active_requests {request} request.priority=-1":    0,
		"active_requests {request} request.priority=1013":  1,
		"active_requests {request} request.priority=other": 86,
	})
	if len(got) != 17 {
		t.Errorf("%d points, want 16 priorities and one for the others", len(got))
	}
	for _, own := range many {
		own.Close()
	}
	want(t, collect(), map[string]float64{"active_requests {request} request.priority=other": 0})
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	if got := collect(); len(got) != 0 {
		t.Errorf("after Close: %v", got)
	}
}

// TestEvent tells events of every kind.
func TestEvent(t *testing.T) {
	m, collect := start(t, nil)
	defer m.Close()
	now := time.Now()
	tell := func(reason abort.Reason, e extproc.Event) {
		own, _ := abort.New(t.Context())
		defer own.Close()
		if e.Handle = own.Handle(); e.Outcome == abort.Aborted {
			e.Handle.Abort(reason)
		}
		e.Settled, e.Ended = now, now.Add(20*time.Millisecond)
		m.Event(e)
	}
	tell("", extproc.Event{Outcome: abort.Completed})
	tell("", extproc.Event{Outcome: abort.Closed, Obstacle: extproc.ObstacleEarlyEnd})
	tell(abort.Draining, extproc.Event{Outcome: abort.Aborted, Phase: abort.Streaming, Effect: extproc.EffectUnconfirmed})
	for i := range 50 {
		tell(abort.Reason(fmt.Sprint("Mine ", i)), extproc.Event{Outcome: abort.Aborted, Phase: abort.Held, Effect: extproc.EffectEnded})
	}
	got := collect()
	want(t, got, map[string]float64{
		"requests {request} request.outcome=completed":                                                       1,
		"requests {request} request.outcome=closed":                                                          1,
		"requests {request} request.outcome=aborted":                                                         51,
		"obstructed_requests {request} obstacle=early_end":                                                   1,
		"evictions {eviction} eviction.effect=unconfirmed,eviction.phase=streaming,eviction.reason=draining": 1,
		"evictions {eviction} eviction.effect=ended,eviction.phase=held,eviction.reason=mine-11":             1,
		"evictions {eviction} eviction.effect=ended,eviction.phase=held,eviction.reason=other":               38, // 16 less the module's four
		"eviction.duration s eviction.phase=held":                                                            50,
	})
	if len(got) != 4+1+12+1+1 {
		t.Errorf("%d points: %v", len(got), got)
	}
}

// TestDecision: work is lost when a victim has been aborted, once, whatever was decided before.
func TestDecision(t *testing.T) {
	m, collect := start(t, nil)
	defer m.Close()
	owns := make([]*abort.Owner, 4)
	var victims []flowcontrol.Victim
	for i := range owns {
		owns[i], _ = abort.New(t.Context())
		defer owns[i].Close()
		victims = append(victims, flowcontrol.Victim{Handle: owns[i].Handle(), Tokens: 100, Generated: 30, Lost: time.Second})
	}
	m.Decision(flowcontrol.Decision{Why: flowcontrol.KV, DryRun: true, Victims: victims})
	m.Decision(flowcontrol.Decision{Why: flowcontrol.KV, Victims: victims[:3]})
	if got := collect(); len(got) != 2 {
		t.Errorf("before anybody ended: %v", got)
	}
	victims[0].Tokens, victims[0].Generated, victims[0].Lost = 150, 80, 2*time.Second
	m.Decision(flowcontrol.Decision{Why: flowcontrol.Slot, Victims: victims[:1]}) // it was spared the first time

	owns[0].Handle().Abort(abort.Preempted)
	owns[1].Handle().Abort(abort.Preempted)
	owns[2].Advance(abort.Streaming)
	owns[2].Settle(abort.Completed)
	owns[3].Handle().Abort(abort.Canceled) // nobody's victim but a dry run's
	if d := cmp.Diff(map[string]float64{
		"decisions {decision} decision.dry_run=true,decision.why=kv":    1,
		"decisions {decision} decision.dry_run=false,decision.why=kv":   1,
		"decisions {decision} decision.dry_run=false,decision.why=slot": 1,
		"lost.kv_cache {token} ":                            250,
		"lost.token.usage {token} gen_ai.token.type=output": 110,
		"lost.engine_time s ":                               3,
		"evictions {eviction} eviction.effect=late,eviction.phase=streaming,eviction.reason=preempted": 1,
	}, collect()); d != "" {
		t.Errorf("points (-want +got):\n%s", d)
	}
}

// TestScene is the whole: behind a fake Envoy a job holds an endpoint's only slot, and a chat
// request evicts it. The streams have spans, as from otelgrpc.
func TestScene(t *testing.T) {
	ev := evictor.New()
	m, collect := start(t, ev)
	defer m.Close()
	pool := flowcontrol.NewPool(ev, flowcontrol.WithEvictionBelow(0), flowcontrol.WithObserver(m.Decision))
	m.Watch(pool)
	const endpoint = "10.0.0.7:8000"
	pool.SetEndpoint(flowcontrol.Endpoint{Name: endpoint, Capacity: 1000, Slots: 1})

	spans := tracetest.NewSpanRecorder()
	tracer := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("test")
	arrived, release := make(chan struct{}, 2), make(chan struct{})
	envoy := &extproctest.Envoy{
		Server: spanned{
			extproc.Wrap(otel.Server(scheduler{pool: pool}), extproc.WithObserver(m.Event)),
			tracer,
		},
		Upstream: extproctest.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			arrived <- struct{}{}
			select {
			case <-r.Context().Done():
			case <-release:
			}
		})),
		Config: &filterpb.ExternalProcessor{
			ProcessingMode: &filterpb.ProcessingMode{ResponseTrailerMode: filterpb.ProcessingMode_SEND},
			MessageTimeout: durationpb.New(10 * time.Second),
		},
		Errorf: t.Errorf,
	}
	statuses := make(chan int, 2)
	get := func(path string) {
		resp, err := (&http.Client{Transport: envoy}).Get("http://model" + path)
		if err != nil {
			t.Error(err)
			statuses <- 0
			return
		}
		resp.Body.Close()
		statuses <- resp.StatusCode
	}
	go get("/job")
	<-arrived
	want(t, collect(), map[string]float64{
		"active_requests {request} request.priority=-1":                                            1,
		"waiting_requests {request} ":                                                              0,
		"endpoint.kv_cache.limit {token} endpoint.name=" + endpoint:                                1000,
		"endpoint.requests {request} endpoint.name=" + endpoint + ",endpoint.request.state=active": 1,
		"endpoint.hung_requests {request} endpoint.name=" + endpoint:                               0,
		"endpoint.breaker 1 endpoint.name=" + endpoint:                                             0,
		"endpoint.evidence 1 endpoint.name=" + endpoint:                                            0,
	})
	go get("/chat")
	await(t, "the chat request waits", func() bool { return pool.Status().Waiting == 1 })
	want(t, collect(), map[string]float64{"waiting_requests {request} ": 1})
	pool.Observe(endpoint, flowcontrol.Sample{Used: 320, At: time.Now()})
	<-arrived
	if s := <-statuses; s != http.StatusTooManyRequests {
		t.Errorf("the job's client got %d", s)
	}
	close(release)
	if s := <-statuses; s != http.StatusOK {
		t.Errorf("the chat's client got %d", s)
	}
	await(t, "both events, and the decision", func() bool {
		got := collect()
		return got["requests {request} request.outcome=aborted"] == 1 && got["requests {request} request.outcome=completed"] == 1 &&
			got["lost.kv_cache {token} "] > 0 && len(spans.Ended()) == 2
	})
	got := collect()
	want(t, got, map[string]float64{
		"active_requests {request} request.priority=-1":                                               0,
		"evictions {eviction} eviction.effect=ended,eviction.phase=unknown,eviction.reason=preempted": 1, // its headers might be skipped
		"eviction.duration s eviction.phase=unknown":                                                  1,
		"decisions {decision} decision.dry_run=false,decision.why=slot":                               1,
	})
	if got["lost.engine_time s "] <= 0 || got["eviction.budget s "] <= 0 || got["endpoint.kv_cache.usage {token} endpoint.name="+endpoint] < 0 {
		t.Errorf("%v", got)
	}
	m.Watch(nil)
	if _, ok := collect()["waiting_requests {request} "]; ok {
		t.Error("a Pool that is not watched")
	}

	var events []string
	for _, s := range spans.Ended() {
		for _, e := range s.Events() {
			set := attribute.NewSet(e.Attributes...)
			events = append(events, e.Name+" "+set.Encoded(attribute.DefaultEncoder()))
			if e.Time.Before(s.StartTime()) || e.Time.After(s.EndTime()) {
				t.Errorf("event at %v of a span from %v to %v", e.Time, s.StartTime(), s.EndTime())
			}
		}
	}
	if d := cmp.Diff([]string{"extevict.eviction extevict.eviction.phase=unknown,extevict.eviction.reason=preempted"}, events); d != "" {
		t.Errorf("span events (-want +got):\n%s", d)
	}
}

// TestAnnotate: what has no span, no request or no abort is harmless.
func TestAnnotate(t *testing.T) {
	spans := tracetest.NewSpanRecorder()
	tracer := sdktrace.NewTracerProvider(sdktrace.WithSpanProcessor(spans)).Tracer("test")

	otel.Annotate(t.Context())
	own, noSpan := abort.New(t.Context())
	otel.Annotate(noSpan)
	own.Handle().Abort(abort.Draining)

	ctx, span := tracer.Start(t.Context(), "no request")
	otel.Annotate(ctx)
	span.End()

	own, ctx = abort.New(t.Context())
	ctx, span = tracer.Start(ctx, "no abort")
	otel.Annotate(ctx)
	own.Settle(abort.Completed)
	span.End()

	own, ctx = abort.New(t.Context())
	ctx, span = tracer.Start(ctx, "abort")
	otel.Annotate(ctx)
	own.Handle().Abort("My Reason")
	span.End()

	got := make(map[string]int)
	for _, s := range spans.Ended() {
		got[s.Name()] = len(s.Events())
	}
	if d := cmp.Diff(map[string]int{"no request": 0, "no abort": 0, "abort": 1}, got); d != "" {
		t.Errorf("span events (-want +got):\n%s", d)
	}
}

// A spanned server has a span for each stream, as grpc's instrumentation makes it.
type spanned struct {
	extprocpb.ExternalProcessorServer
	tracer trace.Tracer
}

func (s spanned) Process(st extprocpb.ExternalProcessor_ProcessServer) error {
	ctx, span := s.tracer.Start(st.Context(), "ext_proc")
	defer span.End()
	return s.ExternalProcessorServer.Process(spannedStream{st, ctx})
}

type spannedStream struct {
	extprocpb.ExternalProcessor_ProcessServer
	ctx context.Context
}

func (s spannedStream) Context() context.Context { return s.ctx }

// A scheduler is an ext_proc server that admits by path.
type scheduler struct {
	extprocpb.UnimplementedExternalProcessorServer
	pool *flowcontrol.Pool
}

func (s scheduler) Process(st extprocpb.ExternalProcessor_ProcessServer) error {
	for {
		r, err := st.Recv()
		if err != nil {
			return nil
		}
		reply := &extprocpb.ProcessingResponse{}
		switch {
		case r.GetRequestHeaders() != nil:
			want := flowcontrol.Request{Priority: 1, Tokens: 100, TTFT: 5 * time.Second}
			for _, h := range r.GetRequestHeaders().GetHeaders().GetHeaders() {
				if h.GetKey() == ":path" && string(h.GetRawValue())+h.GetValue() == "/job" {
					want = flowcontrol.Request{Priority: -1, Tokens: 300}
				}
			}
			if _, err := s.pool.Admit(st.Context(), want); err != nil {
				return err
			}
			reply.Response = &extprocpb.ProcessingResponse_RequestHeaders{RequestHeaders: &extprocpb.HeadersResponse{}}
		case r.GetResponseHeaders() != nil:
			reply.Response = &extprocpb.ProcessingResponse_ResponseHeaders{ResponseHeaders: &extprocpb.HeadersResponse{}}
		case r.GetResponseTrailers() != nil:
			reply.Response = &extprocpb.ProcessingResponse_ResponseTrailers{ResponseTrailers: &extprocpb.TrailersResponse{}}
		}
		if err := st.Send(reply); err != nil {
			return err
		}
	}
}
