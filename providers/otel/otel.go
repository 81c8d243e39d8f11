// Package otel shows what extevict does as metrics and span events of OpenTelemetry.
//
// One rule keeps exports small: every attribute is bounded, and none is an id. Priorities and reasons
// have at most 16 values each, the first that come, and the rest is "other"; endpoints are
// those that the Pool has.
//
//	m, err := otel.New(provider.Meter("yours"), ev) // of extevict/providers, for an *evictor.Evictor
//	if err != nil { ... }
//	defer m.Close()
//	server := extproc.Wrap(otel.Server(yours), extproc.WithObserver(m.Event))
//	pool := flowcontrol.NewPool(ev, flowcontrol.WithObserver(m.Decision))
//	m.Watch(pool)
//
// Each of these works without the others: what is not told is not counted. For span events see
// [Server] and [Annotate].
package otel

import (
	"context"
	"sync"
	"sync/atomic"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/metric"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/flowcontrol"
	"github.com/extevict/extevict/internal/labels"
)

// Metrics are the metrics of one Evictor and at most one Pool. All methods are safe for
// concurrent use.
//
//	extevict.active_requests       updowncounter  {request}   requests that the Evictor tracks
//	    extevict.request.priority
//	extevict.requests              counter        {request}   requests that ended
//	    extevict.request.outcome
//	extevict.obstructed_requests   counter        {request}   of these, those that Envoy's configuration kept from eviction
//	    extevict.obstacle
//	extevict.evictions             counter        {eviction}  requests evicted, or ended before they were
//	    extevict.eviction.reason, extevict.eviction.phase, extevict.eviction.effect
//	extevict.eviction.duration     histogram      s           from the abort to the stream's end, if Envoy ended it
//	    extevict.eviction.phase
//	extevict.decisions             counter        {decision}  decisions about waiting requests
//	    extevict.decision.why, extevict.decision.dry_run
//	extevict.lost.kv_cache         counter        {token}     KV cache that evicted victims of decisions held
//	extevict.lost.token.usage      counter        {token}     tokens that these had generated, guessed where nobody sees them
//	    gen_ai.token.type: "output"
//	extevict.lost.engine_time      counter        s           engine time that these had taken, estimated
//
// An eviction's effect is "ended" if Envoy hung up because of it, "unconfirmed" if that was not
// seen, and "late" if a Decision had chosen the request and it ended otherwise: by itself
// before the abort, or because an Aborter spared it.
//
// With a Pool:
//
//	extevict.waiting_requests           updowncounter  {request}
//	extevict.eviction.budget            gauge          s         engine time that evictions may destroy now
//	extevict.sheddable_ceiling          gauge          1         how full sheddable work may make an endpoint
//	extevict.release_lag                gauge          s         what an engine is taken to need to free what has ended
//
// and of each endpoint, with the attribute extevict.endpoint.name:
//
//	extevict.endpoint.kv_cache.limit    updowncounter  {token}
//	extevict.endpoint.kv_cache.usage    updowncounter  {token}   held ones included
//	extevict.endpoint.kv_cache.held     updowncounter  {token}   for requests that wait for victims to end
//	extevict.endpoint.backlog           updowncounter  {token}   prompts without a first token
//	extevict.endpoint.requests          updowncounter  {request}
//	    extevict.endpoint.request.state: "active" or "ending"
//	extevict.endpoint.hung_requests     updowncounter  {request} of those that are ending: their streams don't end
//	extevict.endpoint.breaker           gauge          1         1 while evictions have shown no effect
//	extevict.endpoint.evidence          gauge          1         1 while there is evidence to evict on
type Metrics struct {
	ev   *evictor.Evictor
	pool atomic.Pointer[flowcontrol.Pool]
	reg  metric.Registration

	priorities, reasons labels.Set

	requests, obstructed, evictions, decisions, kv, generated metric.Int64Counter
	engine                                                    metric.Float64Counter
	duration                                                  metric.Float64Histogram

	active, waiting, limit, usage, held, backlog, running, hung metric.Int64ObservableUpDownCounter
	breaker, evidence                                           metric.Int64ObservableGauge
	budget, ceiling, lag                                        metric.Float64ObservableGauge
}

const (
	priorityKey = attribute.Key("extevict.request.priority")
	outcomeKey  = attribute.Key("extevict.request.outcome")
	obstacleKey = attribute.Key("extevict.obstacle")
	reasonKey   = attribute.Key("extevict.eviction.reason")
	phaseKey    = attribute.Key("extevict.eviction.phase")
	effectKey   = attribute.Key("extevict.eviction.effect")
	whyKey      = attribute.Key("extevict.decision.why")
	dryRunKey   = attribute.Key("extevict.decision.dry_run")
	endpointKey = attribute.Key("extevict.endpoint.name")
	stateKey    = attribute.Key("extevict.endpoint.request.state")
)

var output = metric.WithAttributes(attribute.String("gen_ai.token.type", "output"))

// New returns the Metrics of ev, made by meter; they are observed until Close. It fails as the
// meter does. Without an Evictor (nil) the requests in flight are missing; a collection walks
// all of them, in the order of eviction. New panics if meter is nil.
func New(meter metric.Meter, ev *evictor.Evictor) (*Metrics, error) {
	if meter == nil {
		panic("otel: New: nil Meter")
	}
	m := &Metrics{ev: ev}
	for _, r := range []abort.Reason{abort.Preempted, abort.Overloaded, abort.Draining, abort.Canceled} {
		m.reasons.Of(r.String())
	}
	if err := m.make(meter); err != nil {
		return nil, err
	}
	return m, nil
}

// Close ends the observation of what is in flight and of the Pool. What it returns is the
// meter's error.
func (m *Metrics) Close() error { return m.reg.Unregister() }

// Watch shows the state of p from now on, instead of that of another Pool; nil shows none.
func (m *Metrics) Watch(p *flowcontrol.Pool) { m.pool.Store(p) }

// obstacles are the attribute's values for what is not ObstacleNone.
var obstacles = map[extproc.Obstacle]string{
	extproc.ObstacleObservability: "observability_mode",
	extproc.ObstacleEarlyEnd:      "early_end",
}

// Event counts a request that ended; it is for [extproc.WithObserver].
func (m *Metrics) Event(e extproc.Event) {
	ctx := context.Background() // an Event comes without its request's
	m.requests.Add(ctx, 1, metric.WithAttributes(outcomeKey.String(e.Outcome.String())))
	if o, ok := obstacles[e.Obstacle]; ok {
		m.obstructed.Add(ctx, 1, metric.WithAttributes(obstacleKey.String(o)))
	}
	why, ok := e.Handle.Err().(*abort.Error)
	if !ok {
		return
	}
	m.evicted(m.reasons.Of(why.Reason.String()), e.Phase, e.Effect.String())
	if e.Effect == extproc.EffectEnded {
		m.duration.Record(ctx, e.Ended.Sub(e.Settled).Seconds(), metric.WithAttributes(phaseKey.String(e.Phase.String())))
	}
}

func (m *Metrics) evicted(reason string, p abort.Phase, effect string) {
	m.evictions.Add(context.Background(), 1, metric.WithAttributes(
		reasonKey.String(reason), phaseKey.String(p.String()), effectKey.String(effect),
	))
}

// Decision counts a decision, and its victims' lost work once they have been evicted. It is for
// [flowcontrol.WithObserver], of a Pool or of a Reclaimer.
func (m *Metrics) Decision(d flowcontrol.Decision) {
	m.decisions.Add(context.Background(), 1, metric.WithAttributes(whyKey.String(string(d.Why)), dryRunKey.Bool(d.DryRun)))
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
		m.evicted(abort.Preempted.String(), is.Handle.Progress().Phase, "late")
		return
	}
	ctx := context.Background()
	m.kv.Add(ctx, max(is.Tokens, 0))
	m.generated.Add(ctx, max(is.Generated, 0), output)
	m.engine.Add(ctx, max(is.Lost.Seconds(), 0))
}
