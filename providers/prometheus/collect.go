package prometheus

import (
	"strconv"
	"strings"

	prom "github.com/prometheus/client_golang/prometheus"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/flowcontrol"
)

func desc(name, help string, labels ...string) *prom.Desc {
	return prom.NewDesc(prom.BuildFQName(namespace, "", name), help, labels, nil)
}

var (
	inFlight = desc("requests_in_flight", "Requests that the evictor tracks.", "priority")

	waiting = desc("waiting_requests", "Requests that wait for capacity.")
	budget  = desc("eviction_budget_seconds", "Engine time that evictions may destroy now.")
	ceiling = desc("sheddable_ceiling_ratio", "How full an endpoint may be for sheddable work to start there now.")
	lag     = desc("release_lag_seconds", "What an engine is taken to need to free what has ended.")

	requests = desc("endpoint_requests", "Requests that run or end on an endpoint.", "endpoint", "state")
)

// gauges are those of an endpoint.
var gauges = []struct {
	*prom.Desc
	value func(*flowcontrol.EndpointStatus) float64
}{
	{desc("endpoint_capacity_tokens", "KV cache of an endpoint.", "endpoint"), func(e *flowcontrol.EndpointStatus) float64 { return float64(e.Capacity) }},
	{desc("endpoint_occupied_tokens", "KV cache that is occupied or held.", "endpoint"), func(e *flowcontrol.EndpointStatus) float64 { return float64(e.Occupied) }},
	{desc("endpoint_held_tokens", "KV cache that is held for requests that wait for victims to end.", "endpoint"), func(e *flowcontrol.EndpointStatus) float64 { return float64(e.Held) }},
	{desc("endpoint_backlog_tokens", "Prompts of requests without a first token.", "endpoint"), func(e *flowcontrol.EndpointStatus) float64 { return float64(e.Backlog) }},
	{desc("endpoint_hung_requests", "Requests that were ended and whose streams don't end.", "endpoint"), func(e *flowcontrol.EndpointStatus) float64 { return float64(e.Hung) }},
	{desc("endpoint_breaker_open", "Whether evictions are off because they showed no effect.", "endpoint"), func(e *flowcontrol.EndpointStatus) float64 { return truth(e.Breaker) }},
	{desc("endpoint_evidence_fresh", "Whether there is evidence to evict on.", "endpoint"), func(e *flowcontrol.EndpointStatus) float64 { return truth(e.Fresh) }},
}

func truth(b bool) float64 {
	if b {
		return 1
	}
	return 0
}

// counted are the collectors that count what the observers tell.
func (m *Metrics) counted() []prom.Collector {
	return []prom.Collector{m.requests, m.obstructed, m.evictions, m.decisions, m.duration, m.tokens, m.generated, m.engine}
}

// Describe implements [prom.Collector].
func (m *Metrics) Describe(out chan<- *prom.Desc) {
	for _, c := range m.counted() {
		c.Describe(out)
	}
	for _, d := range []*prom.Desc{inFlight, waiting, budget, ceiling, lag, requests} {
		out <- d
	}
	for _, g := range gauges {
		out <- g.Desc
	}
}

// Collect implements [prom.Collector].
func (m *Metrics) Collect(out chan<- prom.Metric) {
	for _, c := range m.counted() {
		c.Collect(out)
	}
	gauge := func(d *prom.Desc, v float64, labels ...string) {
		out <- prom.MustNewConstMetric(d, prom.GaugeValue, v, labels...)
	}
	if m.ev != nil {
		n := make(map[string]int)
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
			gauge(inFlight, float64(c), l)
		}
	}
	pool := m.pool.Load()
	if pool == nil {
		return
	}
	s := pool.Status()
	gauge(waiting, float64(s.Waiting))
	gauge(budget, s.Budget.Seconds())
	gauge(ceiling, s.SheddableCeiling)
	gauge(lag, s.Lag.Seconds())
	for i := range s.Endpoints {
		e := &s.Endpoints[i]
		name := strings.ToValidUTF8(e.Name, "\ufffd")
		for _, g := range gauges {
			gauge(g.Desc, g.value(e), name)
		}
		gauge(requests, float64(e.Active), name, "active")
		gauge(requests, float64(e.Ending), name, "ending")
	}
}

// priority is what the first description of h says.
func priority(h *abort.Handle) int {
	if reqs := h.Requests(); len(reqs) > 0 {
		return reqs[0].Priority
	}
	return 0
}
