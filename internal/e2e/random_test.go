package e2e_test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
	"github.com/extevict/extevict/extproc"
	"github.com/extevict/extevict/internal/envoy"
)

// sleep sleeps for up to d, or until ctx is done.
func sleep(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(rand.N(d))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

// rambles answers with a few events, cut anywhere, at random times.
func rambles(c *call, w http.ResponseWriter, r *http.Request) error {
	if _, err := io.Copy(io.Discard, r.Body); err != nil {
		return err
	}
	c.text = events(1+rand.IntN(8)) + last
	if err := sleep(r.Context(), 6*time.Millisecond); err != nil {
		return err
	}
	w.Header().Set("Content-Type", "text/event-stream")
	if c.trailer {
		w.Header().Set("Trailer", "X-End")
		defer w.Header().Set("X-End", "yes")
	}
	for rest := c.text; rest != ""; {
		n := len(event(0))
		if rand.IntN(4) == 0 {
			n = 1 + rand.IntN(2*n)
		}
		n = min(n, len(rest))
		if err := write(w, rest[:n]); err != nil {
			return err
		}
		rest = rest[n:]
		if rand.IntN(2) == 0 {
			if err := sleep(r.Context(), 3*time.Millisecond); err != nil {
				return err
			}
		}
	}
	return nil
}

// TestRandom lets 200 evictions come at random times to short responses of eight
// clients: who was evicted, by Evict's account, was hit, exactly; and everybody else
// has everything.
func TestRandom(t *testing.T) {
	for _, m := range modes {
		for _, fake := range []bool{false, true} {
			t.Run(fmt.Sprintf("%v/fake=%v", m, fake), func(t *testing.T) {
				w := start(t, setup{mode: m})
				paths := w.paths[:2]
				if fake {
					paths = w.paths[2:]
				}
				// NONE sees no end but trailers; STREAMED and BUFFERED, as set up, none behind trailers.
				trailer := func() bool { return m.ResponseTrailers == envoy.Send && (m == none || rand.IntN(2) == 0) }
				calls, victims := w.race(t, paths, trailer, 200)
				hits, answers := 0, make(map[extproc.Answer]int)
				for _, c := range calls {
					hit := c.hit(t, w)
					want, effect, won := abort.Completed, extproc.EffectNone, victims[c.handle]
					if won {
						want, effect = abort.Aborted, extproc.EffectEnded
						if c.event.Ended.Sub(c.event.Settled) >= time.Second {
							effect = c.event.Effect // the machine stood still, and the library has its doubts
						}
						hits++
						answers[c.event.Answer]++
					}
					if hit != won || c.event.Outcome != want || c.event.Effect != effect || c.handle.Outcome() != want {
						t.Errorf("%s %s: hit %v, victim %v, event %+v: %+v", c.path.name, c.uri, hit, won, c.event, c.reply)
					}
					if e := ending(c.ended); won != (e == "abort") || !won && e != "canceled" && e != "EOF" {
						t.Errorf("%s %s: victim %v, the ext_proc server's loop ended with %v", c.path.name, c.uri, won, c.ended)
					}
					if !c.fits() {
						t.Errorf("%s %s: %v is not what the client got: %+v", c.path.name, c.uri, c.event.Answer, c.reply)
					}
				}
				lines, err := paths[0].log()
				if hits != len(victims) || len(lines) != len(calls) {
					t.Errorf("%d victims, %d calls; %d of them hit, %d lines in the access log, %v", len(victims), len(calls), hits, len(lines), err)
				}
				t.Logf("%d calls, %d evicted: %v", len(calls), hits, answers)
			})
		}
	}
}

// TestRandomUnseen is the same where nobody tells the library of a response's end:
// an eviction may come too late, and then does nothing.
func TestRandomUnseen(t *testing.T) {
	w := start(t, setup{mode: none})
	calls, victims := w.race(t, w.paths, func() bool { return false }, 200)
	late, wrong := 0, 0
	for _, c := range calls {
		switch hit := c.hit(t, w); {
		case hit && !victims[c.handle]:
			t.Errorf("%s %s: hit, but no victim: %+v", c.path.name, c.uri, c.reply)
		case !hit && victims[c.handle]:
			late++
			// Envoy ends a stream with Canceled, too, when the whole response was there before
			// the reply to its headers: then nothing tells that the answer was too late.
			if c.event.Effect == extproc.EffectEnded {
				wrong++
			}
		case hit && c.event.Effect != extproc.EffectEnded:
			t.Errorf("%s %s: hit, but %v: %+v", c.path.name, c.uri, c.event.Effect, c.event)
		}
	}
	t.Logf("%d calls, %d victims, %d of them too late, %d without the library's knowing", len(calls), len(victims), late, wrong)
}

// race has eight clients call, and evicts at random until there are n victims.
func (w *world) race(t *testing.T, paths []*path, trailer func() bool, n int) (calls []*call, victims map[*abort.Handle]bool) {
	victims = make(map[*abort.Handle]bool)
	var enough atomic.Bool
	var mu sync.Mutex // guards calls
	var clients sync.WaitGroup
	for i := range 8 {
		clients.Go(func() {
			for !enough.Load() && !t.Failed() {
				c := newCall(paths[i%len(paths)], rambles)
				c.trailer = trailer()
				w.start(t.Context(), c)
				if err := c.await(done, observed, hungUp); err != nil {
					t.Errorf("%s %s: %v", c.path.name, c.uri, err)
				}
				mu.Lock()
				calls = append(calls, c)
				mu.Unlock()
			}
		})
	}
	for len(victims) < n && !t.Failed() {
		sleep(t.Context(), 8*time.Millisecond)
		vs, err := w.ev.Evict(t.Context(), evictor.Demand{
			N: 1 + rand.IntN(2), Below: 1, Reason: abort.Preempted,
			Spare: func(*abort.Handle) bool { return rand.IntN(2) == 0 }, // else it were always the latest
		})
		if err != nil {
			t.Error(err)
		}
		for _, h := range vs {
			if victims[h] {
				t.Error("evicted twice")
			}
			victims[h] = true
		}
	}
	enough.Store(true)
	clients.Wait()
	return calls, victims
}

// hit reports whether the client and the access log have an eviction, or neither.
func (c *call) hit(t *testing.T, w *world) bool {
	t.Helper()
	r := c.reply
	l, err := w.line(c)
	if err != nil {
		t.Error(err)
	}
	switch {
	case c.client() == "429" && l == (line{c.uri, 429, "evicted_preempted", ""}):
		return true
	case r.status == 200 && c.path.reset(r.err) && l == (line{c.uri, 200, "evicted_preempted", ""}):
		body, _ := strings.CutSuffix(r.body, errorEvent)
		if !strings.HasPrefix(c.text, body) {
			t.Errorf("%s %s: the client got %q, not the beginning of %q", c.path.name, c.uri, r.body, c.text)
		}
		return true
	case r.status == 200 && r.err == nil && r.body == c.text && l == (line{c.uri, 200, "via_upstream", ""}):
		return false
	}
	t.Errorf("%s %s: odd: %+v, access log %+v", c.path.name, c.uri, r, l)
	return false
}

// fits reports whether the observer was told what the client got.
func (c *call) fits() bool {
	event := strings.HasSuffix(c.reply.body, errorEvent)
	before := strings.TrimSuffix(c.reply.body, errorEvent)
	boundary := before == "" || strings.HasSuffix(before, "\n\n")
	switch c.event.Answer {
	case extproc.AnswerNone:
		return c.reply.err == nil && c.reply.status == 200
	case extproc.AnswerStatus, extproc.AnswerUnknown: // Envoy shows the headers first, also in NONE
		return c.reply.status == 429
	case extproc.AnswerEvent:
		return c.reply.err != nil && event && boundary
	case extproc.AnswerReset:
		// See TestWholeResponse, and TestBusyServer for Envoy 1.39, for those that are not.
		return c.reply.err != nil && !event || c.reply.status == 429 && (is(c.path.envoy, "1.39") || c.isSet(backendDone) && c.served == nil)
	}
	return false
}
