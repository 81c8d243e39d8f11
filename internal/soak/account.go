package main

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/flowcontrol"
)

// An ending is how a request ended, as its client has it.
type ending string

const (
	whole   ending = "whole"   // all of the answer, to the last token
	evicted ending = "evicted" // the answer to an eviction instead
	event   ending = "event"   // the error event, then a reset
	reset   ending = "reset"   // a part of the answer, then a reset
	refused ending = "refused" // the picker's own refusal
	failed  ending = "failed"  // anything else that is no whole answer
	left    ending = "left"    // the client has hung up
)

// A request is one try of a client's. The client writes it before it starts and sets how it
// ended under the account's lock; the rest is the picker's, under that lock too.
type request struct {
	plan
	name    string // of its own, in envoy.CaseHeader
	id      string // x-request-id; a client's retries repeat it
	mode    mode
	started time.Time

	endpoint string // where it was sent
	panicked bool   // the picker did, serving it
	refused  bool   // the picker did
	streams  []*stream

	ended  time.Time
	ending ending
	status int
	reason string // x-evicted-reason
	err    error
	tail   string // of the body
}

// A stream is one run of the picker.
type stream struct {
	handle  *abort.Handle
	request *request // nil before the headers
	settled []abort.Outcome
	events  []extproc.Event
	chosen  []abort.Reason // by which of our calls of Evict
	decided bool           // that it ends, by the Pool
}

// A disruption is when something was restarted: until it had been up again for a while.
type disruption struct {
	what     string
	endpoint string // "" for something that all requests pass
	from, to time.Time
}

// settling is how long after a restart a request may still run into a connection that was
// cut.
const settling = 200 * time.Millisecond

// An account is everything that was done to requests and became of them since it was last
// settled. Its methods may be called concurrently.
type account struct {
	out  io.Writer
	seed uint64

	mu          sync.Mutex // guards what follows, and the requests and streams
	requests    map[string]*request
	streams     map[*abort.Handle]*stream
	aborted     map[string]int // by request id: how many Registry.Abort says it has ended
	disruptions []*disruption
	counts      map[string]int // of all time
	violations  int
}

func newAccount(out io.Writer, seed uint64) *account {
	a := &account{out: out, seed: seed, counts: make(map[string]int)}
	a.clearLocked()
	return a
}

func (a *account) clearLocked() {
	a.requests, a.streams, a.aborted = make(map[string]*request), make(map[*abort.Handle]*stream), make(map[string]int)
	a.disruptions = slices.DeleteFunc(a.disruptions, func(d *disruption) bool { return !d.to.IsZero() })
}

func (a *account) violate(format string, args ...any) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.violateLocked(format, args...)
}

func (a *account) violateLocked(format string, args ...any) {
	if a.violations++; a.violations <= 50 {
		fmt.Fprintf(a.out, "VIOLATION (seed %d, %s): %s\n", a.seed, time.Now().Format("15:04:05.000"), fmt.Sprintf(format, args...))
	}
}

func (a *account) count(what string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.counts[what]++
}

// begin books a request that is about to start.
func (a *account) begin(r *request) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.counts["requests"]++
	a.requests[r.name] = r
}

// change changes what is booked of a request.
func (a *account) change(f func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	f()
}

// open books a stream.
func (a *account) open(h *abort.Handle) *stream {
	a.mu.Lock()
	st := &stream{handle: h}
	a.streams[h] = st
	a.mu.Unlock()
	h.OnSettle(func(oc abort.Outcome) { a.change(func() { st.settled = append(st.settled, oc) }) })
	return st
}

// name books whose a stream is.
func (a *account) name(st *stream, name string) *request {
	a.mu.Lock()
	defer a.mu.Unlock()
	r := a.requests[name]
	if r == nil {
		a.violateLocked("a stream of an unknown request %q", name)
		return nil
	}
	st.request = r
	r.streams = append(r.streams, st)
	return r
}

// observe is the observer of extproc.
func (a *account) observe(e extproc.Event) {
	a.mu.Lock()
	defer a.mu.Unlock()
	st := a.streams[e.Handle]
	if st == nil {
		a.violateLocked("an event of an unknown stream: %+v", e)
		return
	}
	st.events = append(st.events, e)
	a.counts["streams "+e.Outcome.String()]++
	if e.Outcome == abort.Aborted {
		a.counts["answer "+e.Answer.String()]++
		a.counts["effect "+e.Effect.String()]++
		a.counts["reason "+e.Handle.Err().(*abort.Error).Reason.String()]++
	}
}

// decided is the observer of the Pool.
func (a *account) decided(d flowcontrol.Decision) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, v := range d.Victims {
		if v.Priority >= d.For.Priority || v.Priority >= evictBelow {
			a.violateLocked("the Pool evicts priority %d for %d: %v", v.Priority, d.For.Priority, d)
		}
		if st := a.streams[v.Handle]; st != nil {
			st.decided = true
		} else {
			a.violateLocked("the Pool evicts an unknown request: %v", d)
		}
	}
}

// chose books the victims of one of our calls of Evict.
func (a *account) chose(reason abort.Reason, victims []*abort.Handle) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, h := range victims {
		st := a.streams[h]
		if st == nil {
			a.violateLocked("Evict ended an unknown request: %+v", h.Requests())
			continue
		}
		if st.chosen = append(st.chosen, reason); h.Outcome() != abort.Aborted {
			a.violateLocked("Evict returned a request that is %v: %v", h.Outcome(), st)
		}
	}
}

// abortedBy books what Registry.Abort says.
func (a *account) abortedBy(id string, n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.aborted[id] += n
}

// disrupt books a restart while f runs.
func (a *account) disrupt(what, endpoint string, f func()) {
	d := &disruption{what: what, endpoint: endpoint, from: time.Now()}
	a.change(func() { a.disruptions = append(a.disruptions, d); a.counts["restarts of "+what]++ })
	f()
	a.change(func() { d.to = time.Now().Add(settling) })
}

func (a *account) disruptedLocked(r *request) bool {
	return slices.ContainsFunc(a.disruptions, func(d *disruption) bool {
		return (d.endpoint == "" || d.endpoint == r.endpoint) && r.ended.After(d.from) && (d.to.IsZero() || r.started.Before(d.to))
	})
}

// open streams are those whose end was not observed.
func (a *account) openStreams() (n int) {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, st := range a.streams {
		if len(st.events) == 0 {
			n++
		}
	}
	return n
}

func (r *request) String() string {
	var b strings.Builder
	fmt.Fprintf(&b, "request %s (id %s), %v, %+v, at %q, panicked %v, refused %v; from %s for %v: %s, status %d, %q, error %v, tail %q",
		r.name, r.id, r.mode, r.plan, r.endpoint, r.panicked, r.refused,
		r.started.Format("15:04:05.000"), r.ended.Sub(r.started), r.ending, r.status, r.reason, r.err, r.tail)
	for _, st := range r.streams {
		b.WriteString("\n\t" + st.line())
	}
	return b.String()
}

func (st *stream) String() string {
	if st.request != nil {
		return st.request.String()
	}
	return st.line()
}

func (st *stream) line() string {
	s := fmt.Sprintf("stream: settled %v, error %v, chosen %q, decided %v, %+v", st.settled, st.handle.Err(), st.chosen, st.decided, st.handle.Progress())
	for _, e := range st.events {
		s += fmt.Sprintf("\n\tevent: %v in %v, answer %v, effect %v, error %v; settled %s, answered %v later, ended %v later",
			e.Outcome, e.Phase, e.Answer, e.Effect, e.Err, e.Settled.Format("15:04:05.000"), e.Answered.Sub(e.Settled), e.Ended.Sub(e.Settled))
	}
	return s
}

// summary is one line for each thing that was counted.
func (a *account) summary() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	var b strings.Builder
	for _, what := range slices.Sorted(maps.Keys(a.counts)) {
		fmt.Fprintf(&b, "%8d  %s\n", a.counts[what], what)
	}
	fmt.Fprintf(&b, "%8d  violations\n", a.violations)
	return b.String()
}
