// Package prometheus shows what extevict does as metrics for Prometheus.
//
// One rule keeps scrapes small: every label is bounded, and none is an id. Priorities and reasons
// have at most 16 values each, the first that come, and the rest is "other"; endpoints are
// those that the Pool has.
//
//	m := prometheus.New(ev) // of extevict/providers, for an *evictor.Evictor
//	registry.MustRegister(m)
//	server := extproc.Wrap(yours, extproc.WithObserver(m.Event))
//	pool := flowcontrol.NewPool(ev, flowcontrol.WithObserver(m.Decision))
//	m.Watch(pool)
//	http.Handle("/metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{}))
//
// Each of these works without the others: what is not told is not counted.
package prometheus

import (
	"strconv"
	"sync"
	"sync/atomic"

	prom "github.com/prometheus/client_golang/prometheus"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/flowcontrol"
	"github.com/extevict/extevict/internal/labels"
)

// Metrics are the metrics of one Evictor and at most one Pool: a [prom.Collector], to be
// registered. Several in one registry need a label that tells them apart; see
// [prom.WrapRegistererWith]. All methods are safe for concurrent use.
//
//	extevict_requests_in_flight{priority}         gauge      requests that the Evictor tracks
//	extevict_requests_total{outcome}              counter    requests that ended
//	extevict_obstructed_requests_total{obstacle}  counter    of these, those that Envoy's configuration kept from eviction
//	extevict_evictions_total{reason,phase,effect} counter    requests evicted, or ended before they were
//	extevict_eviction_duration_seconds{phase}     histogram  from the abort to the stream's end, if Envoy ended it
//	extevict_decisions_total{why,dry_run}         counter    decisions about waiting requests
//	extevict_lost_tokens_total                    counter    KV cache, in tokens, that evicted victims of decisions held
//	extevict_lost_generated_tokens_total          counter    tokens that these had generated, guessed where nobody sees them
//	extevict_lost_engine_seconds_total            counter    engine time that these had taken, estimated
//
// An eviction's effect is "ended" if Envoy hung up because of it, "unconfirmed" if that was not
// seen, and "late" if a Decision had chosen the request and it ended otherwise: by itself
// before the abort, or because an Aborter spared it.
//
// With a Pool, of which these are gauges:
//
//	extevict_waiting_requests
//	extevict_eviction_budget_seconds              engine time that evictions may destroy now
//	extevict_sheddable_ceiling_ratio              how full sheddable work may make an endpoint
//	extevict_release_lag_seconds                  what an engine is taken to need to free what has ended
//	extevict_endpoint_capacity_tokens{endpoint}
//	extevict_endpoint_occupied_tokens{endpoint}   held ones included
//	extevict_endpoint_held_tokens{endpoint}       for requests that wait for victims to end
//	extevict_endpoint_backlog_tokens{endpoint}    prompts without a first token
//	extevict_endpoint_requests{endpoint,state}    "active" or "ending"
//	extevict_endpoint_hung_requests{endpoint}     of those that are ending: their streams don't end
//	extevict_endpoint_breaker_open{endpoint}      1 while evictions have shown no effect
//	extevict_endpoint_evidence_fresh{endpoint}    1 while there is evidence to evict on
type Metrics struct {
	ev   *evictor.Evictor
	pool atomic.Pointer[flowcontrol.Pool]

	priorities, reasons labels.Set

	requests, obstructed, evictions, decisions *prom.CounterVec
	duration                                   *prom.HistogramVec
	tokens, generated, engine                  prom.Counter
}

const (
	namespace = "extevict"
	late      = "late" // of effects
)

// New returns the Metrics of ev, which may be nil: then the requests in flight are missing. A
// scrape walks all of them, in the order of eviction.
func New(ev *evictor.Evictor) *Metrics {
	vec := func(name, help string, labels ...string) *prom.CounterVec {
		return prom.NewCounterVec(prom.CounterOpts{Namespace: namespace, Name: name, Help: help}, labels)
	}
	counter := func(name, help string) prom.Counter {
		return prom.NewCounter(prom.CounterOpts{Namespace: namespace, Name: name, Help: help})
	}
	m := &Metrics{
		ev:         ev,
		requests:   vec("requests_total", "Requests that ended.", "outcome"),
		obstructed: vec("obstructed_requests_total", "Requests that Envoy's configuration kept from eviction.", "obstacle"),
		evictions:  vec("evictions_total", "Requests evicted, or chosen and ended before they were.", "reason", "phase", "effect"),
		decisions:  vec("decisions_total", "Decisions about waiting requests: why somebody is evicted, or nobody.", "why", "dry_run"),
		tokens:     counter("lost_tokens_total", "KV cache in tokens that evicted victims of decisions held."),
		generated:  counter("lost_generated_tokens_total", "Tokens that evicted victims of decisions had generated."),
		engine:     counter("lost_engine_seconds_total", "Engine time that evicted victims of decisions had taken, estimated."),
		duration: prom.NewHistogramVec(prom.HistogramOpts{
			Namespace: namespace, Name: "eviction_duration_seconds", Help: "Time from an abort to the end of its stream, if Envoy ended it.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1},
		}, []string{"phase"}),
	}
	for _, r := range []abort.Reason{abort.Preempted, abort.Overloaded, abort.Draining, abort.Canceled} {
		m.reasons.Of(r.String())
	}
	// A counter that appears with its first increment hides it from rate().
	for _, o := range []abort.Outcome{abort.Completed, abort.Aborted, abort.Closed} {
		m.requests.WithLabelValues(o.String())
	}
	for _, o := range obstacles {
		m.obstructed.WithLabelValues(o)
	}
	for p := abort.Unknown; p <= abort.Streaming; p++ {
		for _, e := range []string{extproc.EffectEnded.String(), extproc.EffectUnconfirmed.String(), late} {
			m.evictions.WithLabelValues(abort.Preempted.String(), p.String(), e)
		}
	}
	for _, w := range whys {
		m.decisions.WithLabelValues(string(w), "false")
	}
	return m
}

// obstacles are the label values of what is not ObstacleNone.
var obstacles = map[extproc.Obstacle]string{
	extproc.ObstacleObservability: "observability_mode",
	extproc.ObstacleEarlyEnd:      "early_end",
}

var whys = []flowcontrol.Why{
	flowcontrol.KV, flowcontrol.Slot, flowcontrol.Prefill,
	flowcontrol.Coming, flowcontrol.Disabled, flowcontrol.Stale, flowcontrol.Breaker, flowcontrol.Budget, flowcontrol.Hopeless, flowcontrol.Nothing,
}

// Event counts a request that ended; it is for [extproc.WithObserver].
func (m *Metrics) Event(e extproc.Event) {
	m.requests.WithLabelValues(e.Outcome.String()).Inc()
	if o, ok := obstacles[e.Obstacle]; ok {
		m.obstructed.WithLabelValues(o).Inc()
	}
	why, ok := e.Handle.Err().(*abort.Error)
	if !ok {
		return
	}
	m.evictions.WithLabelValues(m.reasons.Of(why.Reason.String()), e.Phase.String(), e.Effect.String()).Inc()
	if e.Effect == extproc.EffectEnded {
		m.duration.WithLabelValues(e.Phase.String()).Observe(e.Ended.Sub(e.Settled).Seconds())
	}
}

// Decision counts a decision, and its victims' lost work once they have been evicted. It is for
// [flowcontrol.WithObserver], of a Pool or of a Reclaimer.
func (m *Metrics) Decision(d flowcontrol.Decision) {
	m.decisions.WithLabelValues(string(d.Why), strconv.FormatBool(d.DryRun)).Inc()
	if d.DryRun {
		return
	}
	for _, v := range d.Victims {
		n := &victim{metrics: m, is: v}
		if old, ok := v.Handle.Attach(m, n).(*victim); ok { // an Aborter spared it before
			old.mu.Lock()
			old.is = v
			old.mu.Unlock()
		}
	}
}

// A victim waits for what becomes of a request that a Decision chose.
type victim struct {
	metrics *Metrics

	mu sync.Mutex // guards what follows
	is flowcontrol.Victim
}

// Settled implements [abort.Settler].
func (v *victim) Settled(oc abort.Outcome) {
	v.mu.Lock()
	is := v.is
	v.mu.Unlock()
	m := v.metrics
	if oc != abort.Aborted {
		m.evictions.WithLabelValues(abort.Preempted.String(), is.Handle.Progress().Phase.String(), late).Inc()
		return
	}
	m.tokens.Add(float64(max(is.Tokens, 0))) // a counter panics if it is to go back
	m.generated.Add(float64(max(is.Generated, 0)))
	m.engine.Add(max(is.Lost.Seconds(), 0))
}

// Watch shows the state of p from now on, instead of that of another Pool; nil shows none.
func (m *Metrics) Watch(p *flowcontrol.Pool) { m.pool.Store(p) }
