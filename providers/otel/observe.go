package otel

import (
	"context"
	"errors"
	"strconv"

	"go.opentelemetry.io/otel/metric"

	"github.com/extevict/extevict/abort"
)

// make makes the instruments.
func (m *Metrics) make(meter metric.Meter) error {
	var errs []error
	var observed []metric.Observable
	counter := func(name, unit, help string) metric.Int64Counter {
		c, err := meter.Int64Counter(name, metric.WithUnit(unit), metric.WithDescription(help))
		errs = append(errs, err)
		return c
	}
	sum := func(name, unit, help string) metric.Int64ObservableUpDownCounter {
		c, err := meter.Int64ObservableUpDownCounter(name, metric.WithUnit(unit), metric.WithDescription(help))
		errs, observed = append(errs, err), append(observed, c)
		return c
	}
	truth := func(name, help string) metric.Int64ObservableGauge {
		c, err := meter.Int64ObservableGauge(name, metric.WithUnit("1"), metric.WithDescription(help))
		errs, observed = append(errs, err), append(observed, c)
		return c
	}
	gauge := func(name, unit, help string) metric.Float64ObservableGauge {
		c, err := meter.Float64ObservableGauge(name, metric.WithUnit(unit), metric.WithDescription(help))
		errs, observed = append(errs, err), append(observed, c)
		return c
	}
	var err error
	m.requests = counter("extevict.requests", "{request}", "Requests that ended.")
	m.obstructed = counter("extevict.obstructed_requests", "{request}", "Requests that Envoy's configuration kept from eviction.")
	m.evictions = counter("extevict.evictions", "{eviction}", "Requests evicted, or chosen and ended before they were.")
	m.decisions = counter("extevict.decisions", "{decision}", "Decisions about waiting requests: why somebody is evicted, or nobody.")
	m.kv = counter("extevict.lost.kv_cache", "{token}", "KV cache that evicted victims of decisions held.")
	m.generated = counter("extevict.lost.token.usage", "{token}", "Tokens that evicted victims of decisions had generated.")
	m.engine, err = meter.Float64Counter("extevict.lost.engine_time", metric.WithUnit("s"),
		metric.WithDescription("Engine time that evicted victims of decisions had taken, estimated."))
	errs = append(errs, err)
	m.duration, err = meter.Float64Histogram("extevict.eviction.duration", metric.WithUnit("s"),
		metric.WithDescription("Time from an abort to the end of its stream, if Envoy ended it."),
		metric.WithExplicitBucketBoundaries(.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1))
	errs = append(errs, err)

	m.active = sum("extevict.active_requests", "{request}", "Requests that the evictor tracks.")
	m.waiting = sum("extevict.waiting_requests", "{request}", "Requests that wait for capacity.")
	m.limit = sum("extevict.endpoint.kv_cache.limit", "{token}", "KV cache of an endpoint.")
	m.usage = sum("extevict.endpoint.kv_cache.usage", "{token}", "KV cache that is occupied or held.")
	m.held = sum("extevict.endpoint.kv_cache.held", "{token}", "KV cache that is held for requests that wait for victims to end.")
	m.backlog = sum("extevict.endpoint.backlog", "{token}", "Prompts of requests without a first token.")
	m.running = sum("extevict.endpoint.requests", "{request}", "Requests that run or end on an endpoint.")
	m.hung = sum("extevict.endpoint.hung_requests", "{request}", "Requests that were ended and whose streams don't end.")
	m.breaker = truth("extevict.endpoint.breaker", "Whether evictions are off because they showed no effect.")
	m.evidence = truth("extevict.endpoint.evidence", "Whether there is evidence to evict on.")
	m.budget = gauge("extevict.eviction.budget", "s", "Engine time that evictions may destroy now.")
	m.ceiling = gauge("extevict.sheddable_ceiling", "1", "How full an endpoint may be for sheddable work to start there now.")
	m.lag = gauge("extevict.release_lag", "s", "What an engine is taken to need to free what has ended.")
	if err := errors.Join(errs...); err != nil {
		return err
	}
	m.reg, err = meter.RegisterCallback(m.observe, observed...)
	return err
}

// observe is the meter's callback.
func (m *Metrics) observe(_ context.Context, o metric.Observer) error {
	if m.ev != nil {
		n := make(map[string]int64)
		for _, l := range m.priorities.All() {
			n[l] = 0 // whoever had requests may have none now
		}
		last, l := 0, ""
		for h := range m.ev.All() { // mostly runs of one priority
			if p := priority(h); p != last || l == "" {
				last, l = p, m.priorities.Of(strconv.Itoa(p))
			}
			n[l]++
		}
		for l, c := range n {
			o.ObserveInt64(m.active, c, metric.WithAttributes(priorityKey.String(l)))
		}
	}
	pool := m.pool.Load()
	if pool == nil {
		return nil
	}
	s := pool.Status()
	o.ObserveInt64(m.waiting, int64(s.Waiting))
	o.ObserveFloat64(m.budget, s.Budget.Seconds())
	o.ObserveFloat64(m.ceiling, s.SheddableCeiling)
	o.ObserveFloat64(m.lag, s.Lag.Seconds())
	for _, e := range s.Endpoints {
		name := endpointKey.String(e.Name)
		at := metric.WithAttributes(name)
		o.ObserveInt64(m.limit, e.Capacity, at)
		o.ObserveInt64(m.usage, e.Occupied, at)
		o.ObserveInt64(m.held, e.Held, at)
		o.ObserveInt64(m.backlog, e.Backlog, at)
		o.ObserveInt64(m.running, int64(e.Active), metric.WithAttributes(name, stateKey.String("active")))
		o.ObserveInt64(m.running, int64(e.Ending), metric.WithAttributes(name, stateKey.String("ending")))
		o.ObserveInt64(m.hung, int64(e.Hung), at)
		o.ObserveInt64(m.breaker, truth(e.Breaker), at)
		o.ObserveInt64(m.evidence, truth(e.Fresh), at)
	}
	return nil
}

func truth(b bool) int64 {
	if b {
		return 1
	}
	return 0
}

// priority is what the first description of h says.
func priority(h *abort.Handle) int {
	if reqs := h.Requests(); len(reqs) > 0 {
		return reqs[0].Priority
	}
	return 0
}
