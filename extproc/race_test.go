package extproc_test

import (
	"context"
	"flag"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/extproc/extproctest"
)

var (
	rounds = flag.Int("rounds", 2000, "random interleavings of each race test")
	seed   = flag.Uint64("seed", 0, "of the first interleaving")
)

// A dice is a source of randomness for one goroutine, and hands out more.
type dice struct{ *rand.Rand }

func newDice(seed uint64) dice        { return dice{rand.New(rand.NewPCG(seed, 1))} }
func (d dice) more() dice             { return newDice(d.Uint64()) }
func (d dice) sleep(max int)          { time.Sleep(time.Duration(d.IntN(max)) * time.Microsecond) }
func (d dice) oneIn(n int) bool       { return d.IntN(n) == 0 }
func pick[T any](d dice, from ...T) T { return from[d.IntN(len(from))] }

// locked makes a function that draws from d safe for several goroutines.
func (d dice) locked(f func(dice)) func() {
	var mu sync.Mutex
	return func() {
		mu.Lock()
		n := d.more()
		mu.Unlock()
		f(n)
	}
}

// interleave runs f in a bubble for each seed.
func interleave(t *testing.T, f func(t *testing.T, d dice)) {
	t.Helper()
	for i := range uint64(*rounds) {
		synctest.Test(t, func(t *testing.T) { f(t, newDice(*seed+i)) })
		if t.Failed() {
			t.Fatalf("seed %d", *seed+i)
		}
	}
}

// TestInterleavings lets everything that ends a request happen at once: evictions
// through an evictor and by hand, the end of the response, a client that leaves, a
// server that returns, panics, answers by itself, or sends from other goroutines
// that outlive Process; over a stream whose Send and Recv take time. Invariants 1,
// 3 and 4.
func TestInterleavings(t *testing.T) {
	seen := map[string]int{}
	interleave(t, func(t *testing.T, d dice) {
		var (
			ev     = evictor.New()
			reg    abort.Registry
			m      = pick(d, none, streamed, buffered, duplex)
			st     = extproctest.NewStream(context.Background(), d.IntN(4))
			server = pick(d, "loop", "own loop", "returns", "panics", "answers", "sends elsewhere", "sends elsewhere", "receives elsewhere")
			stop   = d.IntN(6)
			events []extproc.Event
			others sync.WaitGroup
		)
		if d.oneIn(2) {
			st.Pause = d.more().locked(func(d dice) { d.sleep(4) })
		}
		sd := d.more()
		serve := func(s *extproc.Stream) error {
			recv := s.Recv
			if server == "own loop" {
				recv = s.RecvOrAbort
			}
			if server == "receives elsewhere" {
				recv = func() (r *request, err error) {
					done := make(chan struct{})
					others.Go(func() { r, err = s.Recv(); close(done) })
					<-done
					return r, err
				}
			}
			for i := 0; ; i++ {
				r, err := recv()
				if err != nil {
					if _, again := recv(); again == nil {
						t.Error("Recv's error is not sticky")
					}
					return err
				}
				if r.GetRequestHeaders() != nil {
					ev.TrackRequests(s.Context(), abort.Request{Endpoint: "a", Priority: -1})
					if sd.oneIn(2) {
						ev.TrackRequests(s.Context(), abort.Request{Endpoint: "b", Priority: -1}, abort.Request{Endpoint: "c", Priority: -1})
					}
				}
				if i == stop {
					switch server {
					case "returns":
						return nil
					case "panics":
						panic("boom")
					case "answers":
						s.Send(immediate("own"))
						return nil
					}
				}
				if server == "sends elsewhere" {
					od := sd.more()
					others.Go(func() { od.sleep(12); s.Send(replyIn(m, r)) })
					continue
				}
				if err := s.Send(replyIn(m, r)); err != nil {
					return err
				}
			}
		}
		opts := []extproc.Option{extproc.WithRegistry(&reg), extproc.WithObserver(func(e extproc.Event) { events = append(events, e) })}
		if d.oneIn(2) {
			opts = append(opts, extproc.WithErrorEvent(extproc.ErrorEvent{Wait: time.Duration(d.IntN(12)) * time.Microsecond}))
		}
		if d.oneIn(2) {
			opts = append(opts, extproc.WithKeepalive())
		}
		srv := extproc.Handler(serve, opts...)

		// The proxy: reads answers, and hangs up after an ImmediateResponse or not.
		var wire []*response
		hangsUp := d.oneIn(2)
		proxy := make(chan struct{})
		go func() {
			defer close(proxy)
			for {
				select {
				case r := <-st.Replies():
					wire = append(wire, r)
					if r.GetImmediateResponse() != nil && hangsUp {
						time.Sleep(time.Microsecond)
						st.HangUp()
					}
				case <-st.Context().Done():
					for len(st.Replies()) > 0 {
						wire = append(wire, <-st.Replies())
					}
					return
				}
			}
		}()
		ud, ends := d.more(), d.IntN(3) > 0
		go func() { // the upstream
			st.Push(requestHeaders(m, "x-request-id", "id"))
			ud.sleep(6)
			st.Push(responseHeaders())
			for range ud.IntN(8) {
				ud.sleep(4)
				st.Push(responseBody("data: x\n\n", false))
			}
			ud.sleep(6)
			if ends {
				st.Push(pick(ud, responseBody("data: y\n\n", true), responseTrailers()))
			}
		}()
		var won atomic.Int64
		for range 3 { // those who end requests
			ed := d.more()
			go func() {
				for range 3 {
					ed.sleep(16)
					switch ed.IntN(4) {
					case 0:
						won.Add(int64(reg.Abort("id", abort.Canceled)))
					default:
						vs, err := ev.Evict(context.Background(), evictor.Demand{N: 1, Endpoint: pick(ed, "", "a", "b", "c"), Reason: abort.Preempted})
						if err != nil {
							t.Error(err)
						}
						won.Add(int64(len(vs)))
					}
				}
			}()
		}
		left := d.oneIn(3)
		if left {
			cd := d.more()
			go func() { cd.sleep(15); st.HangUp() }()
		}
		time.AfterFunc(time.Second, st.HangUp) // nothing else ended it
		var err error
		panicked := func() (p any) {
			defer func() { p = recover() }()
			err = st.Serve(srv)
			return nil
		}()
		<-proxy
		others.Wait()
		time.Sleep(2 * time.Second)
		synctest.Wait()

		answers, own := 0, 0
		for i, r := range wire {
			if isEvent(r) && (i == len(wire)-1 || wire[i+1].GetImmediateResponse() == nil) && !left {
				t.Error("an event, and no answer behind it")
			}
			if im := r.GetImmediateResponse(); im != nil {
				if im.Details == "own" {
					own++
				} else {
					answers++
				}
				if i != len(wire)-1 {
					t.Errorf("sent after the answer: %v", wire[i+1])
				}
			}
		}
		w := int(won.Load())
		if w > 1 || answers > w || !left && answers != w || own > 0 && answers > 0 {
			t.Errorf("%d aborts won, %d answers and %d of the server's own on the wire; client left: %v", w, answers, own, left)
		}
		if n := ev.Len() + reg.Len(); n != 0 {
			t.Errorf("%d entries left", n)
		}
		if w == 1 && err != nil {
			t.Errorf("aborted, and Process returned %v", err)
		}
		if server != "panics" && panicked != nil {
			t.Errorf("panic: %v", panicked)
		}
		if len(events) != 1 {
			t.Fatalf("%d events", len(events))
		}
		e := events[0]
		if (e.Outcome == abort.Aborted) != (w == 1) || e.Outcome != e.Handle.Outcome() {
			t.Errorf("event %+v; %d aborts won, outcome %v", e, w, e.Handle.Outcome())
		}
		if (e.Answer != extproc.AnswerNone) != (answers == 1) && !left {
			t.Errorf("event's answer %v, %d on the wire", e.Answer, answers)
		}
		seen[fmt.Sprintf("%v, %v", e.Outcome, e.Answer)]++
	})
	t.Log(seen)
	for _, o := range []string{"completed, none", "closed, none", "aborted, status", "aborted, reset", "aborted, event", "aborted, unknown"} {
		if seen[o] == 0 && *rounds >= 1000 {
			t.Errorf("no round ended %s: the test tests less than it says", o)
		}
	}
}

func isEvent(r *response) bool {
	m := r.GetResponseBody().GetResponse().GetBodyMutation()
	return string(m.GetBody())+string(m.GetStreamedResponse().GetBody()) == errorEvent
}

// TestAbortBeforeExact races AbortBefore(Streaming) against the reply that releases
// the response headers: exactly one of them passes. Invariant 4.
func TestAbortBeforeExact(t *testing.T) {
	won := map[bool]int{}
	interleave(t, func(t *testing.T, d dice) {
		st := extproctest.NewStream(context.Background(), 10)
		if d.oneIn(2) {
			st.Pause = d.more().locked(func(d dice) { d.sleep(3) })
		}
		m := pick(d, streamed, duplex)
		got := make(chan bool, 1)
		srv := extproc.Wrap(serverFunc(func(s process) error {
			for {
				r, err := s.Recv()
				if err != nil {
					return err
				}
				if r.GetResponseHeaders() == nil {
					s.Send(replyIn(m, r))
					continue
				}
				ad, h := d.more(), handle(s)
				go func() { ad.sleep(4); got <- h.AbortBefore(abort.Streaming, abort.Preempted) }()
				d.sleep(4)
				s.Send(replyIn(m, r))
				time.Sleep(time.Millisecond)
				return nil
			}
		}))
		go func() { st.Push(requestHeaders(m)); st.Push(responseHeaders()) }()
		st.Serve(srv)
		released := false
		for len(st.Replies()) > 0 {
			released = released || (<-st.Replies()).GetResponseHeaders() != nil
		}
		w := <-got
		if w == released {
			t.Errorf("AbortBefore: %v, response headers released: %v", w, released)
		}
		won[w]++
		time.Sleep(time.Second) // for who is still in Send or Recv
	})
	if t.Log(won); len(won) < 2 && *rounds >= 100 {
		t.Error("one side always won: no race")
	}
}

// TestParallel does without a bubble what needs real parallelism: many goroutines
// abort one request, also after its end.
func TestParallel(t *testing.T) {
	for range *rounds / 10 {
		st := extproctest.NewStream(context.Background(), 10)
		ready := make(chan *abort.Handle, 1)
		srv := extproc.Wrap(serverFunc(func(s process) error { ready <- handle(s); return echo(streamed)(s) }))
		done := make(chan error, 1)
		go func() { done <- st.Serve(srv) }()
		h := <-ready
		var won atomic.Int64
		var wg sync.WaitGroup
		for range 100 {
			wg.Go(func() {
				if h.Abort(abort.Canceled) {
					won.Add(1)
				}
			})
		}
		wg.Go(func() { st.Push(requestHeaders(streamed)); st.Push(responseBody("", true)) })
		for r := range st.Replies() {
			if r.GetImmediateResponse() != nil || r.GetResponseBody() != nil {
				break
			}
		}
		st.HangUp()
		wg.Wait()
		if err := <-done; err != nil && won.Load() > 0 {
			t.Fatal(err)
		}
		if won.Load() > 1 || (won.Load() == 1) != (h.Outcome() == abort.Aborted) {
			t.Fatalf("%d aborts won, outcome %v", won.Load(), h.Outcome())
		}
	}
}
