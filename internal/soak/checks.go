package main

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"runtime/pprof"
	"slices"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
)

// quiet checks that everything still works, and everything else when nothing is in flight.
func (s *soak) quiet() {
	a := s.account
	a.count("quiet points")
	probe := &request{plan: plan{priority: 1000, prompt: 10, output: 5, streamed: true}, id: "probe"}
	probe.name = fmt.Sprintf("probe-%d", s.crowd.number)
	if s.crowd.call(probe); probe.ending != whole {
		a.violate("the probe: %v", probe)
	}
	s.crowd.hangUp()
	for _, e := range s.gateway.engines {
		e.hangUp()
	}
	time.Sleep(time.Second)
	for end := time.Now().Add(5 * time.Second); s.gateway.idle() != nil && time.Now().Before(end); {
		time.Sleep(10 * time.Millisecond)
	}
	if err := s.gateway.idle(); err != nil {
		a.violate("when nothing is in flight: %v; %+v", err, s.gateway.pool.Status())
	}
	a.settle()
	s.checkResources()
}

// resources are what the process has when nothing is in flight.
type resources struct {
	goroutines, files int
	heap              uint64 // bytes; 0 before it has been in use
}

// heapSlack is how much the heap may be above its base.
const heapSlack = 2 << 20

func (s *soak) checkResources() {
	now := measure()
	first := s.base.goroutines == 0
	for end := time.Now().Add(5 * time.Second); !first && now.above(s.base) && time.Now().Before(end); now = measure() {
		time.Sleep(100 * time.Millisecond)
	}
	fmt.Fprintf(s.out, "%6v  quiet: %d goroutines, %d files, %d KiB of heap\n", time.Since(s.start).Round(time.Second), now.goroutines, now.files, now.heap>>10)
	switch {
	case first:
		s.base = resources{now.goroutines, now.files, 0}
	case now.above(s.base):
		s.account.violate("not flat: %+v, was %+v", now, s.base)
		if now.goroutines > s.base.goroutines {
			pprof.Lookup("goroutine").WriteTo(s.out, 1)
		}
	case s.base.heap == 0:
		s.base.heap = now.heap
	}
}

func (r resources) above(base resources) bool {
	return r.goroutines > base.goroutines || r.files > base.files || base.heap > 0 && r.heap > base.heap+heapSlack
}

// measure returns the resources in use.
func measure() resources {
	runtime.GC()
	runtime.GC() // what finalizers and pools held
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	files, _ := os.ReadDir("/proc/self/fd")
	return resources{runtime.NumGoroutine(), len(files), m.HeapAlloc}
}

// idle says what is not as it should be when there are no requests.
func (g *gateway) idle() error {
	var errs []error
	zero := func(what string, n int) {
		if n != 0 {
			errs = append(errs, fmt.Errorf("%d %s", n, what))
		}
	}
	zero("requests tracked by the evictor", g.evictor.Len())
	zero("requests in the registry", g.registry.Len())
	zero("requests listed by the evictor", len(slices.Collect(g.evictor.All())))
	for id := range g.registry.All() {
		errs = append(errs, fmt.Errorf("the registry lists %q", id))
	}
	s := g.pool.Status()
	zero("requests waiting in the Pool", s.Waiting)
	if len(s.Endpoints) != engines {
		errs = append(errs, fmt.Errorf("%d endpoints in the Pool", len(s.Endpoints)))
	}
	for _, e := range s.Endpoints {
		zero("active at "+e.Name, e.Active)
		zero("ending at "+e.Name, e.Ending)
		zero("tokens held at "+e.Name, int(e.Held))
		zero("tokens occupied at "+e.Name, int(e.Occupied))
		zero("tokens of backlog at "+e.Name, int(e.Backlog))
	}
	for _, e := range g.engines {
		s := e.stats()
		zero("KV blocks used by the engine "+e.address, s.BlocksUsed)
		zero("requests in the engine "+e.address, s.Running+s.Waiting+s.Leaked)
	}
	zero("streams without an event", g.account.openStreams())
	return errors.Join(errs...)
}

// settle checks everything when nothing is in flight, and forgets it.
func (a *account) settle() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, st := range a.streams {
		if why := a.wrongLocked(st); why != "" {
			a.violateLocked("%s: %v", why, st)
		}
	}
	for id, n := range a.aborted {
		if n != 0 {
			a.violateLocked("Registry.Abort said it had ended %d more requests of id %q than were", n, id)
		}
	}
	for _, r := range a.requests {
		a.counts[r.outcome()+": client "+string(r.ending)]++
		switch why := r.unexplained(); {
		case why == "":
		case a.disruptedLocked(r):
			a.counts["ends explained only by a restart"]++
		default:
			a.violateLocked("%s: %v", why, r)
		}
	}
	a.clearLocked()
}

// wrongLocked says what is wrong with a stream whatever else went on: it has one outcome, and
// an abort is one of ours.
func (a *account) wrongLocked(st *stream) string {
	if len(st.settled) != 1 || len(st.events) != 1 || st.settled[0] != st.events[0].Outcome || st.handle.Outcome() != st.settled[0] {
		return "not one outcome"
	}
	isAborted := st.settled[0] == abort.Aborted
	switch {
	case len(st.chosen) > 1:
		return "evicted twice"
	case len(st.chosen) == 1 && !isAborted:
		return "a victim that was not aborted"
	case !isAborted:
		return ""
	case st.request == nil:
		return "aborted before its headers"
	}
	switch reason := st.handle.Err().(*abort.Error).Reason; reason {
	case ours, abort.Draining:
		if len(st.chosen) != 1 || st.chosen[0] != reason {
			return "no victim of ours"
		}
	case abort.Canceled:
		if a.aborted[st.request.id]--; a.aborted[st.request.id] < 0 {
			return "aborted by id without a call"
		}
	case abort.Preempted:
		if !st.decided {
			return "no victim of the Pool's"
		}
	default:
		return "a reason that nobody gave"
	}
	return ""
}

// outcome is how the request ended as its picker has it.
func (r *request) outcome() string {
	if len(r.streams) == 0 {
		return "no stream"
	}
	return r.streams[0].handle.Outcome().String()
}

// unexplained says why the client's end does not follow from the outcome of a request that no
// restart has touched.
func (r *request) unexplained() string {
	switch {
	case r.ending == left:
		return ""
	case len(r.streams) != 1:
		return fmt.Sprintf("%d streams", len(r.streams))
	}
	e := r.streams[0].events
	if len(e) != 1 {
		return "" // said by wrongLocked
	}
	var want []ending
	switch oc := e[0].Outcome; {
	case r.panicked && oc != abort.Aborted: // Completed if that was over the response's last part
		want = []ending{failed, reset}
	case oc == abort.Completed || oc == abort.Closed && !r.refused && !r.mode.seesEnd():
		want = []ending{whole}
	case oc == abort.Closed && r.refused:
		want = []ending{refused}
	case oc == abort.Aborted:
		if r.ending == evicted && r.reason != r.streams[0].handle.Err().(*abort.Error).Reason.String() {
			return "evicted for another reason"
		}
		switch e[0].Answer {
		case extproc.AnswerStatus, extproc.AnswerUnknown:
			want = []ending{evicted}
		case extproc.AnswerEvent:
			want = []ending{event}
			if r.stalls { // what Envoy could not write yet is lost in a reset
				want = append(want, reset)
			}
		case extproc.AnswerReset:
			want = []ending{reset, evicted} // a forecast: Envoy may still have held the headers
		}
		if !r.mode.seesEnd() { // it may come too late
			want = append(want, whole)
		}
	}
	if !slices.Contains(want, r.ending) {
		return fmt.Sprintf("the client's end is %q, the outcome explains %q", r.ending, want)
	}
	return ""
}
