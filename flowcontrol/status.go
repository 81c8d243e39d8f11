package flowcontrol

import (
	"time"

	"github.com/extevict/extevict/internal/policy"
)

// A Status is what a Pool knows at a moment: for metrics and for people who look.
type Status struct {
	Waiting          int           // requests
	Budget           time.Duration // engine time that evictions may destroy now
	SheddableCeiling float64       // how full an endpoint may be for sheddable work to start there now
	Lag              time.Duration // what an engine is taken to need to free what has ended
	Endpoints        []EndpointStatus
}

// An EndpointStatus is what a Pool knows of an endpoint.
type EndpointStatus struct {
	Name     string
	Capacity int64   // tokens
	Occupied int64   // tokens: the ledger's and others', as corrected by samples, and Held
	Held     int64   // tokens, for requests that wait for victims to end
	Active   int     // requests that run
	Ending   int     // requests that were ended, and whose capacity is not taken to be back
	Hung     int     // of Ending: those whose streams don't end
	Backlog  int64   // prompt tokens of requests without a first token
	Speed    float64 // of prefill, in tokens per ms
	Fresh    bool    // there is evidence to evict on
	Breaker  bool    // evictions showed no effect: there are none for now
}

// Status returns what the Pool knows now, endpoints in order of their names.
func (p *Pool) Status() Status {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := Status{
		Waiting: p.core.Waiting(), Budget: milliseconds(p.core.Budget()),
		SheddableCeiling: p.core.SheddableCeiling(), Lag: p.core.Lag(),
	}
	p.core.Status(p.now(), func(e policy.Status) {
		s.Endpoints = append(s.Endpoints, EndpointStatus{
			Name: e.Name, Capacity: e.Capacity, Occupied: e.Occupied, Held: e.Held, Active: e.Active, Ending: e.Ending,
			Hung: e.Wedged, Backlog: e.Backlog, Speed: e.Speed, Fresh: e.Fresh, Breaker: e.Breaker,
		})
	})
	return s
}
