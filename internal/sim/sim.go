// Package sim replays request traces against simulated engines and gateways, in virtual
// time, to learn what a policy of admission and eviction is worth.
//
// The engines are internal/engine's, stepped; the gateway under test is the core that
// package flowcontrol runs. Beside it stand the baselines: a gateway that never evicts, one
// that evicts by a gauge, and our own with perfect knowledge. The same Config gives the same
// Result.
package sim

import (
	"container/heap"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/extevict/extevict/internal/engine"
	"github.com/extevict/extevict/internal/policy"
)

// A Config is a scene. Zero fields have defaults.
type Config struct {
	Seed     uint64
	Duration time.Duration // 420 s
	Warm     time.Duration // before the first urgent request; 20 s

	Endpoints int           // 4
	Engine    engine.Config // AbortLag 20 ms
	Policy    Policy        // how gateways decide
	Gateways  int           // that share the endpoints and know nothing of each other; 1

	Urgent      []Record      // priority 0, or as the trace says; below 0 it is sheddable, and comes when the trace says all the same
	Scale       float64       // time compression of Urgent; 1
	Sheddable   []Record      // priority -1: a backlog
	Start       int           // number of the record in Sheddable, from 1, that the backlog begins after; 0 is at random
	Workers     int           // clients with one sheddable request each at a time, again when it ends
	Only        int           // endpoints that may take urgent requests, the first ones; 0 is all
	Split       int           // endpoints that prefill, the first ones, for the others to decode; 0 is no such roles
	Target      time.Duration // of the urgent's TTFT; 500 ms
	SharePrefix bool          // engines share the prefixes that the traces' hashes tell

	Confirm     time.Duration    // from an abort to the stream's end; 3 ms
	Unconfirmed float64          // share of aborts whose stream is not seen to end, though the engine ends the request
	Sample      time.Duration    // period; 50 ms
	SampleLag   time.Duration    // until a sample arrives
	SampleLoss  float64          // share that does not arrive
	Jitter      float64          // of period and lag, as a share, below 1
	Outage      [2]time.Duration // no samples from, to
	Overload    [2]time.Duration // urgent requests come three times as fast from, to
	Remove      time.Duration    // when the last endpoint goes away, if positive

	Retry  Retry
	GiveUp int // evictions after which a client gives up; 6

	Record time.Duration // keep the endpoints' usage in steps of this; 0 doesn't
}

// Retry is what the client of an evicted request does.
type Retry int

const (
	Backoff    Retry = iota // 0.5 s * 2^n, jittered
	Immediate               // again at once
	RetryAfter              // when the gateway says: in 1 s to 30 s
	Never
)

func (c Config) withDefaults() Config {
	if c.Duration == 0 {
		c.Duration = 420 * time.Second
	}
	if c.Warm == 0 {
		c.Warm = 20 * time.Second
	}
	if c.Endpoints == 0 {
		c.Endpoints = 4
	}
	if c.Gateways == 0 {
		c.Gateways = 1
	}
	if c.Engine.AbortLag == 0 {
		c.Engine.AbortLag = 20 * time.Millisecond
	}
	if c.Engine.Blocks == 0 {
		c.Engine.Blocks = 3000
	}
	if c.Scale == 0 {
		c.Scale = 1
	}
	if c.Target == 0 {
		c.Target = 500 * time.Millisecond
	}
	if c.Confirm == 0 {
		c.Confirm = 3 * time.Millisecond
	}
	if c.Sample == 0 {
		c.Sample = 50 * time.Millisecond
	}
	if c.GiveUp == 0 {
		c.GiveUp = 6
	}
	switch {
	case c.Policy == nil:
		panic("sim: no Policy")
	case !(c.Jitter >= 0 && c.Jitter < 1):
		panic("sim: Jitter is not a share below 1")
	case c.Endpoints < 0 || c.Only < 0 || c.Only > c.Endpoints || c.Split < 0 || c.Split >= c.Endpoints:
		panic("sim: Only or Split of more than the Endpoints")
	case c.Gateways < 0 || c.Workers < 0 || c.Start < 0 || c.GiveUp < 0:
		panic("sim: negative number")
	case min(c.Duration, c.Warm, c.Sample, c.SampleLag, c.Confirm) < 0 || !(c.Scale > 0):
		panic("sim: time runs backwards")
	}
	return c
}

// job is one piece of work, over all its attempts.
type job struct {
	urgent   bool
	rec      *Record
	priority int
	arrived  time.Duration // the first time
	evicted  int
	worker   int
	g        gateway

	// Of the attempt that runs.
	offered time.Duration
	placed  time.Duration
	e       *server
	seq     *engine.Sequence
	ended   bool // evicted
	first   time.Duration
	decode  bool            // prefilled elsewhere
	request *policy.Request // Ours
}

// server is one endpoint.
type server struct {
	sim  *simulation
	id   int
	name string
	core *engine.Core
	next time.Duration // when core steps
	idle bool
	gone bool
}

// A gateway admits jobs and evicts them. It calls the simulation's start, evict and reject.
type gateway interface {
	offer(*job)
	token(*job)    // it has got one
	finished(*job) // its answer is complete
	ended(*job)    // the stream of an evicted one has ended
	freed(*job)    // the engine has let go of an evicted one, which no real gateway is told
	sample(*server, engine.Stats, time.Duration)
	removed(*server)
	// decide does what there is to do now and says when it wants to be asked again, if
	// nothing happens before.
	decide() (next time.Duration, idle bool)
	waiting() (urgent, sheddable int)
	delay() time.Duration // the forecast of what a victim would wait for
}

type simulation struct {
	cfg      Config
	now      time.Duration
	rng      *rand.Rand
	servers  []*server
	gateways []gateway
	events   events
	seq      int
	nextShed int // place in the sheddable trace
	retrying int // jobs that will come again
	hashes   map[*Record][]uint64
	running  map[*engine.Sequence]*job
	res      *Result
	largest  int
	decided  []time.Duration
}

// event is something that happens at a time.
type event struct {
	at  time.Duration
	seq int
	do  func()
}

type events []event

func (h events) Len() int { return len(h) }
func (h events) Less(i, j int) bool {
	return h[i].at < h[j].at || h[i].at == h[j].at && h[i].seq < h[j].seq
}
func (h events) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h *events) Push(x any)   { *h = append(*h, x.(event)) }
func (h *events) Pop() any {
	l := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return l
}

func (s *simulation) at(t time.Duration, do func()) {
	s.seq++
	heap.Push(&s.events, event{t, s.seq, do})
}

// Run runs the scene, and panics if it makes no sense. progress, if it isn't nil, is told the virtual time now and
// then.
func Run(c Config, progress func(time.Duration)) *Result {
	c = c.withDefaults()
	s := &simulation{
		cfg: c, rng: rand.New(rand.NewPCG(c.Seed, 0)), hashes: map[*Record][]uint64{},
		running: map[*engine.Sequence]*job{}, res: &Result{Target: c.Target, Duration: c.Duration},
		largest: c.Engine.Blocks * blockSize(c.Engine) * 6 / 10,
	}
	for i := range c.Endpoints {
		e := c.Engine
		if c.Split > 0 && i >= c.Split {
			e = decoder(e)
		}
		s.servers = append(s.servers, &server{sim: s, id: i, name: fmt.Sprintf("e%02d", i), core: engine.New(e), idle: true})
	}
	for range c.Gateways {
		s.gateways = append(s.gateways, c.Policy.gateway(s))
	}
	s.workload()
	s.samples()
	if c.Remove > 0 {
		s.at(c.Remove, s.remove)
	}
	s.loop(progress)
	s.finish()
	return s.res
}

// decoder is an engine that gets KV blocks from one that has prefilled: what would be its prefill
// is their transfer, at a million tokens a second.
func decoder(c engine.Config) engine.Config {
	if c.Cost == (engine.Cost{}) {
		c.Cost = engine.DefaultCost
	}
	c.Cost.Prefill = time.Microsecond
	c.MaxBatchedTokens = 1 << 16
	return c
}

func blockSize(c engine.Config) int {
	if c.BlockSize > 0 {
		return c.BlockSize
	}
	return 16
}

func (s *simulation) loop(progress func(time.Duration)) {
	var told time.Duration
	wake := make([]time.Duration, len(s.gateways))
	for {
		next := s.cfg.Duration
		if len(s.events) > 0 {
			next = min(next, s.events[0].at)
		}
		for _, e := range s.servers {
			if !e.idle {
				next = min(next, e.next)
			}
		}
		for _, t := range wake {
			if t >= 0 {
				next = min(next, t)
			}
		}
		s.now = max(s.now, next)
		if s.now >= s.cfg.Duration {
			return
		}
		if progress != nil && s.now-told >= time.Second {
			told = s.now
			progress(s.now)
		}
		for len(s.events) > 0 && s.events[0].at <= s.now {
			heap.Pop(&s.events).(event).do()
		}
		for _, e := range s.servers {
			if !e.idle && e.next <= s.now {
				e.step()
			}
		}
		for i, g := range s.gateways {
			start := time.Now()
			t, idle := g.decide()
			s.decided = append(s.decided, time.Since(start))
			if wake[i] = t; idle {
				wake[i] = -1
			} else if t <= s.now {
				wake[i] = s.now + time.Microsecond
			}
		}
	}
}

// step is a boundary between two steps of an engine.
func (e *server) step() {
	s := e.sim
	r := e.core.Step(s.now)
	for _, q := range r.Tokens {
		if j := s.running[q]; !j.ended {
			if q.Generated == 1 && !j.decode {
				j.first = s.now
			}
			j.g.token(j)
		}
	}
	for _, q := range r.Ended {
		j := s.running[q]
		delete(s.running, q)
		if j.ended {
			j.g.freed(j)
		} else {
			s.completed(j)
		}
	}
	s.res.Preemptions += len(r.Preempted)
	e.next, e.idle = r.Next, r.Idle
}

// allowed are the endpoints that may take a job; nil is all.
func (s *simulation) allowed(j *job) []*server {
	es := s.servers
	switch {
	case s.cfg.Split > 0 && j.decode:
		return es[s.cfg.Split:]
	case s.cfg.Split > 0:
		return es[:s.cfg.Split]
	case s.cfg.Only > 0 && j.urgent:
		return es[:s.cfg.Only]
	}
	return nil
}

// start puts a job into an engine's queue.
func (s *simulation) start(j *job, e *server) {
	j.e, j.placed = e, s.now
	if j.urgent && !j.decode {
		s.res.Waits = append(s.res.Waits, s.now-j.offered)
	}
	r := engine.Request{Prompt: j.rec.Prompt, Output: j.rec.Output, Stream: true}
	if s.cfg.Split > 0 && !j.decode {
		r.Output = 1
	}
	if s.cfg.SharePrefix {
		r.Hashes = s.blocks(j.rec)
	}
	q, err := e.core.Add(s.now, r)
	if err != nil {
		panic(err) // the workload has only what fits
	}
	j.seq = q
	s.running[q] = j
	e.wake()
}

// wake has an idle engine look at what is new.
func (e *server) wake() {
	if e.idle {
		e.idle, e.next = false, e.sim.now
	}
}

// blocks are the hashes of a record's blocks as the engine counts them.
func (s *simulation) blocks(r *Record) []uint64 {
	if len(r.Hashes) == 0 {
		return nil
	}
	if h, ok := s.hashes[r]; ok {
		return h
	}
	per := HashTokens / blockSize(s.cfg.Engine)
	h := make([]uint64, 0, len(r.Hashes)*per)
	for _, id := range r.Hashes {
		for k := range per {
			h = append(h, id*uint64(per)+uint64(k)+1)
		}
	}
	s.hashes[r] = h
	return h
}

// evict ends a job's attempt for its gateway and its client, and has the client try again, which is
// another attempt of the same job.
func (s *simulation) evict(j *job) {
	s.res.evicted(j)
	old := *j
	old.ended = true
	s.running[j.seq] = &old
	j.e.core.Abort(s.now, j.seq)
	j.e.wake()
	if s.rng.Float64() >= s.cfg.Unconfirmed {
		s.at(s.now+s.cfg.Confirm, func() { old.g.ended(&old) })
	}
	j.evicted++
	s.res.MostEvictions = max(s.res.MostEvictions, j.evicted)
	j.e, j.seq, j.request, j.first, j.decode = nil, nil, nil, 0, false
	if j.evicted > s.cfg.GiveUp || s.cfg.Retry == Never {
		s.res.GaveUp++
		s.replace(j)
		return
	}
	var wait time.Duration
	switch s.cfg.Retry {
	case Backoff:
		wait = time.Duration(500 * math.Pow(2, float64(old.evicted)) * (0.5 + s.rng.Float64()) * float64(time.Millisecond))
	case RetryAfter:
		// As flowcontrol.Pool.RetryAfter says it.
		d := min(j.g.delay(), 30*time.Second)
		d += time.Duration(s.rng.Float64() * float64(d/4+time.Second))
		wait = min(max(d.Truncate(time.Second), time.Second), 30*time.Second)
	}
	s.retrying++
	s.at(s.now+wait, func() {
		s.retrying--
		s.offer(j)
	})
}

// reject ends a job that its gateway won't serve.
func (s *simulation) reject(j *job) {
	s.res.Rejected++
	s.replace(j)
}

// replace has the client of a job that failed go on with its next one in a second.
func (s *simulation) replace(j *job) {
	if j.worker >= 0 {
		s.at(s.now+time.Second, func() { s.again(j.worker) })
	}
}

func (s *simulation) offer(j *job) {
	j.offered = s.now
	j.g.offer(j)
}

func (s *simulation) completed(j *job) {
	j.g.finished(j)
	if s.cfg.Split > 0 && !j.decode && j.rec.Output > 1 {
		j.e, j.seq, j.request, j.decode = nil, nil, nil, true
		s.offer(j)
		return
	}
	s.res.completed(j)
	if j.worker >= 0 {
		s.again(j.worker)
	}
}

// workload schedules all arrivals.
func (s *simulation) workload() {
	c := &s.cfg
	if len(c.Sheddable) > 0 {
		if s.nextShed = s.rng.IntN(len(c.Sheddable)); c.Start > 0 {
			s.nextShed = (c.Start - 1) % len(c.Sheddable)
		}
		for w := range c.Workers {
			s.again(w)
		}
	}
	n := 0
	for i := range c.Urgent {
		r := &c.Urgent[i]
		if r.Prompt+r.Output >= s.largest {
			continue
		}
		at := c.Warm + time.Duration(float64(r.At)/c.Scale)
		if c.Overload[1] > 0 {
			at = s.overload(at)
		}
		if at >= c.Duration {
			continue
		}
		j := &job{urgent: r.Priority >= 0, rec: r, priority: r.Priority, arrived: at, worker: -1, g: s.gateways[n%len(s.gateways)]}
		n++
		if j.urgent {
			s.res.urgent = append(s.res.urgent, j)
		}
		s.at(at, func() {
			s.res.Jobs++
			s.offer(j)
		})
	}
}

// overload is when something happens that would at t, if time is three times as fast between
// two moments.
func (s *simulation) overload(t time.Duration) time.Duration {
	from, to := s.cfg.Overload[0], s.cfg.Overload[1]
	switch inside := 3 * (to - from); {
	case t <= from:
		return t
	case t-from <= inside:
		return from + (t-from)/3
	default:
		return t - inside + (to - from)
	}
}

// again gives a client its next sheddable request.
func (s *simulation) again(worker int) {
	l := s.cfg.Sheddable
	for range l {
		s.nextShed = (s.nextShed + 1) % len(l)
		r := &l[s.nextShed]
		if r.Prompt+r.Output >= s.largest {
			continue
		}
		s.res.Jobs++
		s.offer(&job{rec: r, priority: -1, arrived: s.now, worker: worker, g: s.gateways[worker%len(s.gateways)]})
		return
	}
}

// samples schedules the endpoints' samples.
func (s *simulation) samples() {
	c := &s.cfg
	jitter := func(d time.Duration) time.Duration {
		return time.Duration(float64(d) * (1 + c.Jitter*(2*s.rng.Float64()-1)))
	}
	for i, e := range s.servers {
		var take func()
		take = func() {
			if e.gone {
				return
			}
			at, st := s.now, e.core.Stats()
			s.res.usage(e, st, at, c.Record)
			out := at >= c.Outage[0] && at < c.Outage[1]
			if !out && s.rng.Float64() >= c.SampleLoss {
				deliver := func() {
					for _, g := range s.gateways {
						g.sample(e, st, at)
					}
				}
				if c.SampleLag > 0 {
					s.at(s.now+jitter(c.SampleLag), deliver)
				} else {
					deliver()
				}
			}
			s.at(s.now+jitter(c.Sample), take)
		}
		s.at(c.Sample*time.Duration(i)/time.Duration(len(s.servers)), take)
	}
}

// remove takes the last endpoint away: what runs there runs on.
func (s *simulation) remove() {
	e := s.servers[len(s.servers)-1]
	e.gone = true
	for _, g := range s.gateways {
		g.removed(e)
	}
}

// finish counts what was not over by the end.
func (s *simulation) finish() {
	s.res.finish(s.now, s.decided)
	s.res.Retrying = s.retrying
	for _, j := range s.running {
		if !j.ended {
			s.res.Running++
		}
	}
	for _, g := range s.gateways {
		u, l := g.waiting()
		s.res.WaitingUrgent += u
		s.res.WaitingSheddable += l
	}
	slices.Sort(s.res.Waits)
}
