package sim

import (
	"cmp"
	"math"
	"slices"
	"time"

	"github.com/extevict/extevict/internal/engine"
	"github.com/extevict/extevict/internal/policy"
)

// A Policy is how gateways decide.
type Policy interface {
	gateway(*simulation) gateway
}

// Ours is the core of package flowcontrol.
type Ours struct {
	Config policy.Config
	// Perfect makes it the oracle: instead of samples and confirmed aborts it knows each millisecond what
	// engines hold, and at once when they have freed what was evicted.
	Perfect bool
	Observe func(*policy.Decision) // told each decision; may be nil
}

func (o Ours) gateway(s *simulation) gateway {
	g := &ours{simulation: s, o: o, core: policy.New(o.Config), jobs: map[*policy.Request]*job{}, byName: map[string]*server{}}
	for _, e := range s.servers {
		st := e.core.Stats()
		g.core.SetEndpoint(0, policy.Endpoint{Name: e.name, Capacity: int64(st.BlocksTotal * st.BlockSize), Slots: maxSeqs(s.cfg.Engine)})
		g.byName[e.name] = e
	}
	if o.Perfect {
		var look func()
		look = func() {
			for _, e := range s.servers {
				if !e.gone {
					g.tell(e, e.core.Stats(), s.now)
				}
			}
			s.at(s.now+time.Millisecond, look)
		}
		s.at(0, look)
	}
	return g
}

func maxSeqs(c engine.Config) int {
	if c.MaxSeqs > 0 {
		return c.MaxSeqs
	}
	return 256
}

type ours struct {
	*simulation
	o      Ours
	core   *policy.Core
	jobs   map[*policy.Request]*job // not over, nor evicted
	byName map[string]*server
	queue  [2]int // sheddable, urgent
}

func class(j *job) int {
	if j.urgent {
		return 1
	}
	return 0
}

func (g *ours) offer(j *job) {
	r := &policy.Request{Priority: j.priority, Prompt: int64(j.rec.Prompt), Evictions: j.evicted, Tag: j}
	if j.urgent {
		r.Target = g.cfg.Target
	}
	for _, e := range g.allowed(j) {
		r.Endpoints = append(r.Endpoints, e.name)
	}
	j.request = r
	g.jobs[r] = j
	g.queue[class(j)]++
	g.core.Offer(g.now, r)
}

func (g *ours) token(j *job) { g.core.Count(g.now, j.request, true, int64(j.seq.Generated)) }

func (g *ours) finished(j *job) {
	g.core.Finish(g.now, j.request, g.cfg.Split == 0 || j.decode) // a prefill's end says nothing of answers
	delete(g.jobs, j.request)
}

func (g *ours) ended(j *job) {
	if !g.o.Perfect {
		g.core.Ended(g.now, j.request)
	}
}

func (g *ours) freed(j *job) {
	if g.o.Perfect {
		g.core.Ended(g.now, j.request)
		g.core.Finish(g.now, j.request, false)
	}
}

func (g *ours) sample(e *server, st engine.Stats, at time.Duration) {
	if !g.o.Perfect {
		g.tell(e, st, at)
	}
}

func (g *ours) tell(e *server, st engine.Stats, at time.Duration) {
	g.core.Sample(g.now, e.name, policy.Sample{Used: int64(st.BlocksUsed * st.BlockSize), Capacity: int64(st.BlocksTotal * st.BlockSize), At: at})
}

func (g *ours) removed(e *server) { g.core.RemoveEndpoint(g.now, e.name) }

func (g *ours) waiting() (urgent, sheddable int) { return g.queue[1], g.queue[0] }

func (g *ours) delay() time.Duration { return g.core.Delay(g.now) }

func (g *ours) decide() (time.Duration, bool) {
	st := g.core.Step(g.now)
	for _, d := range st.Decisions {
		if g.o.Observe != nil {
			g.o.Observe(d)
		}
		if d.DryRun {
			continue
		}
		for _, v := range d.Victims {
			g.evict(g.take(v.Request))
		}
	}
	for _, r := range st.Dispatch {
		j := g.jobs[r]
		g.queue[class(j)]--
		g.start(j, g.byName[r.Endpoint()])
	}
	for _, r := range st.Reject {
		j := g.take(r.Request)
		g.queue[class(j)]--
		g.reject(j)
	}
	return st.Next, st.Idle
}

func (g *ours) take(r *policy.Request) *job {
	j := g.jobs[r]
	delete(g.jobs, r)
	return j
}

// Gauge is the controller that most gateways have: each millisecond it admits while a gauge is below a
// ceiling, and above it evicts a few of the newest, waits until their streams have ended and a grace has
// passed, and looks again.
type Gauge struct {
	Concurrency int           // the gauge is requests in flight, of so many per endpoint; 0: KV usage and queues as sampled
	Evict       int           // at most so many at a time; 0 never evicts
	Grace       time.Duration // after the streams' end
	Ceiling     float64       // 1
}

// hangs is how long a Gauge waits for the end of a stream.
const hangs = 10 * time.Second

func (p Gauge) gateway(s *simulation) gateway {
	if p.Ceiling == 0 {
		p.Ceiling = 1
	}
	g := &gauge{simulation: s, p: p, state: map[*server]*gaugeState{}, out: map[*engine.Sequence]*gaugeState{}}
	for _, e := range s.servers {
		g.state[e] = &gaugeState{}
	}
	g.all = slices.Clone(s.servers)
	return g
}

type gauge struct {
	*simulation
	p      Gauge
	all    []*server // that are there
	state  map[*server]*gaugeState
	queues [2][]*job                        // sheddable, urgent
	out    map[*engine.Sequence]*gaugeState // evicted, streams not ended
	until  time.Duration                    // no eviction before
	next   time.Duration                    // cycle
}

type gaugeState struct {
	inflight []*job
	ending   int
	kv       float64
	waiting  int
}

func (g *gauge) offer(j *job)    { g.queues[class(j)] = append(g.queues[class(j)], j) }
func (g *gauge) token(*job)      {}
func (g *gauge) freed(*job)      {}
func (g *gauge) finished(j *job) { g.drop(j) }
func (g *gauge) drop(j *job) {
	st := g.state[j.e]
	st.inflight = slices.DeleteFunc(st.inflight, func(o *job) bool { return o == j })
}
func (g *gauge) ended(j *job) { g.over(j.seq) }
func (g *gauge) over(q *engine.Sequence) {
	if st, ok := g.out[q]; ok {
		delete(g.out, q)
		st.ending--
		g.until = max(g.until, g.now+g.p.Grace)
	}
}
func (g *gauge) sample(e *server, st engine.Stats, _ time.Duration) {
	g.state[e].kv, g.state[e].waiting = st.KVUsage(), st.Waiting
}
func (g *gauge) removed(e *server) {
	g.all = slices.DeleteFunc(g.all, func(o *server) bool { return o == e })
}
func (g *gauge) waiting() (urgent, sheddable int) { return len(g.queues[1]), len(g.queues[0]) }
func (g *gauge) delay() time.Duration             { return 0 } // it forecasts nothing

func (g *gauge) saturation() (sum float64) {
	for _, e := range g.all {
		st := g.state[e]
		if g.p.Concurrency > 0 {
			sum += float64(len(st.inflight)+st.ending) / float64(g.p.Concurrency)
		} else {
			sum += math.Max(float64(st.waiting)/5, st.kv/0.8)
		}
	}
	return sum / float64(len(g.all))
}

func (g *gauge) decide() (time.Duration, bool) {
	if len(g.queues[0])+len(g.queues[1]) == 0 {
		return 0, true
	}
	if g.now < g.next {
		return g.next, false
	}
	g.next = g.now.Truncate(time.Millisecond) + time.Millisecond
	for range 64 {
		k := 1
		if len(g.queues[1]) == 0 {
			k = 0
		}
		if len(g.queues[k]) == 0 {
			return 0, true
		}
		j := g.queues[k][0]
		es := g.all
		if a := g.allowed(j); a != nil {
			es = slices.DeleteFunc(slices.Clone(g.all), func(e *server) bool { return !slices.Contains(a, e) })
		}
		if len(es) == 0 {
			break
		}
		if sat := g.saturation(); sat >= g.p.Ceiling {
			if k == 1 && g.p.Evict > 0 {
				g.reclaim(sat)
			}
			break
		}
		g.queues[k] = g.queues[k][1:]
		e := slices.MinFunc(es, func(a, b *server) int {
			x, y := g.state[a], g.state[b]
			return cmp.Or(cmp.Compare(len(x.inflight), len(y.inflight)), cmp.Compare(x.kv, y.kv))
		})
		g.state[e].inflight = append(g.state[e].inflight, j)
		g.start(j, e)
		if g.p.Concurrency == 0 {
			break // its gauge doesn't move before the next sample
		}
	}
	return g.next, false
}

func (g *gauge) reclaim(sat float64) {
	if len(g.out) > 0 || g.now < g.until {
		return
	}
	var all []*job
	n := 0
	for _, e := range g.all {
		for _, j := range g.state[e].inflight {
			n++
			if !j.urgent {
				all = append(all, j)
			}
		}
	}
	if len(all) == 0 {
		return
	}
	slices.SortStableFunc(all, func(a, b *job) int { return cmp.Compare(b.placed, a.placed) })
	k := int(math.Max(1, math.Ceil((sat-g.p.Ceiling)*float64(n)/sat)))
	for _, j := range all[:min(k, g.p.Evict, len(all))] {
		g.drop(j)
		q, st := j.seq, g.state[j.e]
		st.ending++
		g.out[q] = st
		g.at(g.now+hangs, func() { g.over(q) })
		g.evict(j)
	}
}
