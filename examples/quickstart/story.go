package main

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/flowcontrol"
	"github.com/extevict/extevict/internal/engine"
)

// The clients' API keys, and what they are worth: the higher matters more.
const (
	batchKey, batchPriority   = "key-of-the-batch-jobs", -1
	urgentKey, urgentPriority = "key-of-the-chat-site", 1
)

// A story is the stage: what runs, and how the story learns what happens there.
type story struct {
	options
	engine  *engineServer
	picker  *picker
	url     string // the gateway's
	client  *http.Client
	ends    chan engine.End    // from the engine, one for each request
	settled chan extproc.Event // from the picker's streams, likewise
	out     *screen
}

// An act fills the engine with batch requests, and then the urgent one arrives. It
// belongs to the goroutine of play.
type act struct {
	requests []*request // in the order in which they are sent, the urgent one last
	sent     int
	full     sample   // the last before the urgent request was sent
	samples  []sample // all
	evicts   []flowcontrol.Decision

	// The three ends of a request, by its name.
	clients map[string]*request
	engines map[string]engine.End
	streams map[string]extproc.Event
}

func (s *story) newAct() *act {
	a := &act{clients: make(map[string]*request), engines: make(map[string]engine.End), streams: make(map[string]extproc.Event)}
	for i := range s.requests {
		a.requests = append(a.requests, &request{name: fmt.Sprintf("batch-%d", i+1), key: batchKey, prompt: batchPrompt, max: s.tokens})
	}
	a.requests = append(a.requests, &request{name: "urgent", key: urgentKey, prompt: urgentPrompt, max: urgentTokens})
	return a
}

func (a *act) urgent() *request  { return a.requests[len(a.requests)-1] }
func (a *act) batch() []*request { return a.requests[:len(a.requests)-1] }

// due returns the next request if its time has come, else nil. Requests follow each
// other by tokens and not by time, so that a slow machine sees the same story.
func (a *act) due() *request {
	if a.sent == len(a.requests) {
		return nil
	}
	next := a.requests[a.sent]
	if a.sent == 0 {
		return next
	}
	last := a.requests[a.sent-1]
	gap := max(1, last.max/4/len(a.batch()))
	if next == a.urgent() {
		gap = last.max / 8
	}
	if int(last.received.Load()) < gap || len(a.samples) == 0 {
		return nil
	}
	return next
}

// over reports whether all is known of each request.
func (a *act) over() bool {
	for _, e := range a.streams {
		if e.Outcome == abort.Aborted && a.decision(e.Handle) == nil {
			return false
		}
	}
	return min(len(a.clients), len(a.engines), len(a.streams)) == len(a.requests)
}

// decision returns the one to evict h, or nil.
func (a *act) decision(h *abort.Handle) *flowcontrol.Decision {
	for i := range a.evicts {
		if slices.ContainsFunc(a.evicts[i].Victims, func(v flowcontrol.Victim) bool { return v.Handle == h }) {
			return &a.evicts[i]
		}
	}
	return nil
}

// play plays an act. Its goroutine is the only one that knows what goes on: the others
// tell it, and those that it starts have ended when it returns.
func (s *story) play(ctx context.Context, title string, evict bool) (*act, error) {
	// It takes 7 ms a token on an idle machine.
	patience := 10*time.Second + time.Duration(s.tokens)*20*time.Millisecond
	ctx, cancel := context.WithTimeout(ctx, patience)
	var others sync.WaitGroup
	defer others.Wait()
	defer cancel()

	decisions := make(chan flowcontrol.Decision)
	opts := []flowcontrol.Option{flowcontrol.WithObserver(func(d flowcontrol.Decision) {
		select {
		case decisions <- d:
		case <-ctx.Done():
		}
	})}
	if evict {
		opts = append(opts, flowcontrol.WithEvictionBelow(0))
	}
	pool := s.picker.newPool(flowcontrol.Endpoint{Name: s.engine.addr, Slots: s.requests, Capacity: s.engine.tokens()}, opts...)
	var observed time.Time

	a := s.newAct()
	s.out.act(title)
	reports := make(chan report, 2*len(a.requests)) // all there can be
	samples := make(chan sample)
	others.Go(func() { s.engine.scrape(ctx, samples) })
	for !a.over() {
		if r := a.due(); r != nil {
			a.sent++
			s.tellSent(a, r)
			others.Go(func() { r.do(ctx, s.client, s.url, reports) })
		}
		select {
		case m := <-samples:
			if m.err != nil {
				return nil, m.err
			}
			a.samples = append(a.samples, m)
			s.out.engine(m, s.requests)
			if m.at.Sub(observed) >= 50*time.Millisecond { // more is of no use
				observed = m.at
				pool.Observe(s.engine.addr, flowcontrol.Sample{Used: int64(m.kv * float64(s.engine.tokens())), At: m.at})
			}
		case d := <-decisions:
			if !d.Evicts() {
				s.tellDecision(time.Now(), "has no room for "+d.For.ID+" yet", &d)
				break
			}
			a.evicts = append(a.evicts, d)
			for _, v := range d.Victims {
				for _, r := range v.Handle.Requests() {
					s.tellEviction(a, r.ID)
				}
			}
		case r := <-reports:
			if !r.end {
				s.tellFirst(a, r.request)
				break
			}
			if r.status != http.StatusOK {
				return nil, fmt.Errorf("%s: got status %d, error %v", r.name, r.status, r.err)
			}
			a.clients[r.name] = r.request
			s.tellEnd(a, r.request)
			s.tellEviction(a, r.name)
		case e := <-s.ends:
			a.engines[e.ID] = e
			s.tellEviction(a, e.ID)
		case e := <-s.settled:
			id := described(e).ID
			a.streams[id] = e
			s.tellEviction(a, id)
		case <-ctx.Done():
			return nil, fmt.Errorf("not over after %v: of %d requests %d have ended for the client, %d for the engine, %d for the picker",
				patience, len(a.requests), len(a.clients), len(a.engines), len(a.streams))
		}
	}
	s.out.say(time.Now(), "batch", "%d of %d requests are complete", a.completed(), s.requests)
	return a, nil
}

// described returns what the picker said of a request.
func described(e extproc.Event) abort.Request {
	if rs := e.Handle.Requests(); len(rs) > 0 {
		return rs[0]
	}
	return abort.Request{}
}

func (s *story) tellSent(a *act, r *request) {
	switch {
	case r == a.urgent():
		a.full = a.samples[len(a.samples)-1]
		s.out.sayEngine(a.full, s.requests)
		s.out.say(time.Now(), r.name, "arrives: priority %d, %d tokens", urgentPriority, r.max)
	case a.sent == 1:
		s.out.say(time.Now(), "batch", "%d requests arrive one by one: priority %d, %d tokens each", s.requests, batchPriority, r.max)
	case s.verbose:
		s.out.say(time.Now(), r.name, "arrives")
	}
}

func (s *story) tellFirst(a *act, r *request) {
	if r == a.urgent() || s.verbose {
		s.out.say(r.first, r.name, "gets its first token, after %s", ms(r.first.Sub(r.sent)))
	}
}

func (s *story) tellEnd(a *act, r *request) {
	switch {
	case r.err != nil: // see tellEviction
	case r == a.urgent() || s.verbose:
		s.out.say(r.end, r.name, "is complete: %d tokens, %d bytes", r.received.Load(), r.bytes)
	case a.sent == len(a.requests) && a.urgent().received.Load() == 0:
		s.out.say(r.end, r.name, "is complete, which frees a slot")
	}
}

// tellDecision tells what the picker's Pool has decided, and why.
func (s *story) tellDecision(at time.Time, what string, d *flowcontrol.Decision) {
	s.out.say(at, "picker", "%s:", what)
	for part := range strings.SplitAfterSeq(d.String(), ": ") {
		s.out.more("%s", strings.TrimSpace(part))
	}
}

// tellEviction tells of a victim once all is known of it: the decision and the
// three ends come within milliseconds, in any order.
func (s *story) tellEviction(a *act, id string) {
	client, stream, end := a.clients[id], a.streams[id], a.engines[id]
	if client == nil || stream.Outcome != abort.Aborted || end.At.IsZero() {
		return
	}
	d := a.decision(stream.Handle)
	if d == nil {
		return
	}
	s.tellDecision(stream.Settled, "evicts "+id, d)
	if client.event == (apiError{}) {
		s.out.say(client.end, id, "gets a reset, after status %d and %d bytes:", client.status, client.bytes)
	} else {
		s.out.say(client.end, id, "gets an error event, %s:", client.event.Code)
		s.out.more("%q", client.event.Message)
		s.out.more("and then a reset, after status %d and %d bytes:", client.status, client.bytes)
	}
	s.out.more("%v", client.err)
	s.out.say(end.At, "engine", "ends it (%s): %d KV blocks are free", end.Reason, kvBlocks(end.PromptTokens, end.Tokens))
}
