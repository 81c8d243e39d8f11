package prometheus_test

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	filterpb "github.com/envoyproxy/go-control-plane/envoy/extensions/filters/http/ext_proc/v3"
	extprocpb "github.com/envoyproxy/go-control-plane/envoy/service/ext_proc/v3"
	"github.com/google/go-cmp/cmp"
	prom "github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"github.com/prometheus/client_golang/prometheus/testutil"
	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"google.golang.org/protobuf/types/known/durationpb"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/extproc/extproctest"
	"github.com/extevict/extevict/flowcontrol"
	"github.com/extevict/extevict/providers/prometheus"
)

// scrape registers m, gets /metrics over HTTP and returns its samples by their names and labels;
// of histograms, the count. It fails if promlint has a complaint.
func scrape(t *testing.T, m *prometheus.Metrics) map[string]float64 {
	t.Helper()
	registry := prom.NewPedanticRegistry()
	registry.MustRegister(m)
	problems, err := testutil.GatherAndLint(registry)
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range problems {
		t.Errorf("promlint: %s: %s", p.Metric, p.Text)
	}
	s := httptest.NewServer(promhttp.HandlerFor(registry, promhttp.HandlerOpts{ErrorHandling: promhttp.HTTPErrorOnError}))
	defer s.Close()
	resp, err := s.Client().Get(s.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	parser := expfmt.NewTextParser(model.UTF8Validation)
	families, err := parser.TextToMetricFamilies(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	got := make(map[string]float64)
	for name, f := range families {
		for _, x := range f.Metric {
			var ls []string
			for _, l := range x.Label {
				ls = append(ls, l.GetName()+"="+l.GetValue())
			}
			key := strings.TrimPrefix(name, "extevict_") + "{" + strings.Join(ls, ",") + "}"
			switch f.GetType() {
			case dto.MetricType_COUNTER:
				got[key] = x.Counter.GetValue()
			case dto.MetricType_GAUGE:
				got[key] = x.Gauge.GetValue()
			case dto.MetricType_HISTOGRAM:
				got[key] = float64(x.Histogram.GetSampleCount())
			default:
				t.Errorf("%s is a %v", name, f.GetType())
			}
		}
	}
	return got
}

// want compares the samples that it names.
func want(t *testing.T, got, want map[string]float64) {
	t.Helper()
	some := make(map[string]float64)
	for k := range want {
		if v, ok := got[k]; ok {
			some[k] = v
		}
	}
	if d := cmp.Diff(want, some); d != "" {
		t.Errorf("samples (-want +got):\n%s", d)
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

// TestFresh: what can be counted is there before it happens.
func TestFresh(t *testing.T) {
	want(t, scrape(t, prometheus.New(nil)), map[string]float64{
		"requests_total{outcome=aborted}":                                    0,
		"requests_total{outcome=closed}":                                     0,
		"requests_total{outcome=completed}":                                  0,
		"obstructed_requests_total{obstacle=early_end}":                      0,
		"evictions_total{effect=ended,phase=streaming,reason=preempted}":     0,
		"evictions_total{effect=late,phase=held,reason=preempted}":           0,
		"evictions_total{effect=unconfirmed,phase=waiting,reason=preempted}": 0,
		"evictions_total{effect=unconfirmed,phase=unknown,reason=preempted}": 0,
		"decisions_total{dry_run=false,why=kv}":                              0,
		"decisions_total{dry_run=false,why=nothing}":                         0,
		"lost_tokens_total{}":                                                0,
		"lost_engine_seconds_total{}":                                        0,
	})
}

// TestInFlight: priorities come and go, and are bounded.
func TestInFlight(t *testing.T) {
	ev := evictor.New()
	m := prometheus.New(ev)
	a, b := begin(t, ev, -1), begin(t, ev, -1)
	begin(t, ev, 7)
	want(t, scrape(t, m), map[string]float64{"requests_in_flight{priority=-1}": 2, "requests_in_flight{priority=7}": 1})
	a.Close()
	b.Close()
	var many []*abort.Owner
	for p := range 100 {
		many = append(many, begin(t, ev, 1000+p))
	}
	got := scrape(t, m)
	want(t, got, map[string]float64{
		"requests_in_flight{priority=-1}":    0,
		"requests_in_flight{priority=7}":     1,
		"requests_in_flight{priority=1013}":  1,
		"requests_in_flight{priority=other}": 86,
	})
	n := 0
	for k := range got {
		if strings.HasPrefix(k, "requests_in_flight") {
			n++
		}
	}
	if n != 17 {
		t.Errorf("%d priorities, want 16 and one for the others", n)
	}
	for _, own := range many {
		own.Close()
	}
	want(t, scrape(t, m), map[string]float64{"requests_in_flight{priority=other}": 0})
}

// TestEvent tells events of every kind.
func TestEvent(t *testing.T) {
	m := prometheus.New(nil)
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
	tell(abort.Draining, extproc.Event{Outcome: abort.Aborted, Phase: abort.Streaming, Effect: extproc.EffectEnded})
	tell(abort.Draining, extproc.Event{Outcome: abort.Aborted, Phase: abort.Streaming, Effect: extproc.EffectUnconfirmed})
	for i := range 50 {
		tell(abort.Reason(fmt.Sprint("Mine ", i)), extproc.Event{Outcome: abort.Aborted, Phase: abort.Held, Effect: extproc.EffectEnded})
	}
	want(t, scrape(t, m), map[string]float64{
		"requests_total{outcome=completed}":                                   1,
		"requests_total{outcome=closed}":                                      1,
		"requests_total{outcome=aborted}":                                     52,
		"obstructed_requests_total{obstacle=early_end}":                       1,
		"obstructed_requests_total{obstacle=observability_mode}":              0,
		"evictions_total{effect=ended,phase=streaming,reason=draining}":       1,
		"evictions_total{effect=unconfirmed,phase=streaming,reason=draining}": 1,
		"evictions_total{effect=ended,phase=held,reason=mine-11}":             1,
		"evictions_total{effect=ended,phase=held,reason=other}":               38, // 16 less the module's four
		"eviction_duration_seconds{phase=streaming}":                          1,
		"eviction_duration_seconds{phase=held}":                               50,
	})
}

// TestDecision: work is lost when a victim has been aborted, once, whatever was decided before.
func TestDecision(t *testing.T) {
	m := prometheus.New(nil)
	owns := make([]*abort.Owner, 4)
	var victims []flowcontrol.Victim
	for i := range owns {
		owns[i], _ = abort.New(t.Context())
		defer owns[i].Close()
		victims = append(victims, flowcontrol.Victim{Handle: owns[i].Handle(), Tokens: 100, Generated: 30, Lost: time.Second})
	}
	m.Decision(flowcontrol.Decision{Why: flowcontrol.KV, DryRun: true, Victims: victims})
	m.Decision(flowcontrol.Decision{Why: flowcontrol.KV, Victims: victims[:3]})
	m.Decision(flowcontrol.Decision{Why: flowcontrol.Budget})
	want(t, scrape(t, m), map[string]float64{"lost_tokens_total{}": 0})
	victims[0].Tokens, victims[0].Generated, victims[0].Lost = 150, 80, 2*time.Second
	m.Decision(flowcontrol.Decision{Why: flowcontrol.Slot, Victims: victims[:1]}) // it was spared the first time

	owns[0].Handle().Abort(abort.Preempted)
	owns[1].Handle().Abort(abort.Preempted)
	owns[2].Advance(abort.Streaming)
	owns[2].Settle(abort.Completed)
	owns[3].Handle().Abort(abort.Canceled) // nobody's victim but a dry run's
	want(t, scrape(t, m), map[string]float64{
		"decisions_total{dry_run=true,why=kv}":                           1,
		"decisions_total{dry_run=false,why=kv}":                          1,
		"decisions_total{dry_run=false,why=slot}":                        1,
		"decisions_total{dry_run=false,why=budget}":                      1,
		"lost_tokens_total{}":                                            250,
		"lost_generated_tokens_total{}":                                  110,
		"lost_engine_seconds_total{}":                                    3,
		"evictions_total{effect=late,phase=streaming,reason=preempted}":  1,
		"evictions_total{effect=ended,phase=streaming,reason=preempted}": 0,
	})
}

// TestScene is the whole: behind a fake Envoy a job holds an endpoint's only slot, and a chat
// request evicts it.
func TestScene(t *testing.T) {
	ev := evictor.New()
	m := prometheus.New(ev)
	pool := flowcontrol.NewPool(ev, flowcontrol.WithEvictionBelow(0), flowcontrol.WithObserver(m.Decision))
	m.Watch(pool)
	const endpoint = "10.0.0.7:8000"
	pool.SetEndpoint(flowcontrol.Endpoint{Name: endpoint, Capacity: 1000, Slots: 1})

	arrived, release := make(chan string, 2), make(chan struct{})
	envoy := &extproctest.Envoy{
		Server: extproc.Wrap(scheduler{pool: pool}, extproc.WithObserver(m.Event)),
		Upstream: extproctest.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			arrived <- r.URL.Path
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
	want(t, scrape(t, m), map[string]float64{
		"requests_in_flight{priority=-1}":                           1,
		"waiting_requests{}":                                        0,
		"endpoint_capacity_tokens{endpoint=" + endpoint + "}":       1000,
		"endpoint_requests{endpoint=" + endpoint + ",state=active}": 1,
		"endpoint_hung_requests{endpoint=" + endpoint + "}":         0,
		"endpoint_breaker_open{endpoint=" + endpoint + "}":          0,
		"endpoint_evidence_fresh{endpoint=" + endpoint + "}":        0,
	})
	go get("/chat")
	await(t, "the chat request waits", func() bool { return pool.Status().Waiting == 1 })
	want(t, scrape(t, m), map[string]float64{"waiting_requests{}": 1})
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
		got := scrape(t, m)
		return got["requests_total{outcome=aborted}"] == 1 && got["requests_total{outcome=completed}"]+got["requests_total{outcome=closed}"] == 1 &&
			got["lost_tokens_total{}"] > 0
	})
	got := scrape(t, m)
	want(t, got, map[string]float64{
		"requests_in_flight{priority=-1}":                              0,
		"evictions_total{effect=ended,phase=unknown,reason=preempted}": 1, // its headers might be skipped
		"eviction_duration_seconds{phase=unknown}":                     1,
		"decisions_total{dry_run=false,why=slot}":                      1,
		"endpoint_requests{endpoint=" + endpoint + ",state=active}":    0,
	})
	if got["lost_tokens_total{}"] < 300 || got["lost_engine_seconds_total{}"] <= 0 || got["eviction_budget_seconds{}"] <= 0 {
		t.Errorf("%v", got)
	}
	m.Watch(nil)
	if _, ok := scrape(t, m)["waiting_requests{}"]; ok {
		t.Error("a Pool that is not watched")
	}
}

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
