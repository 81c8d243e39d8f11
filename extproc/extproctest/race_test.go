package extproctest_test

import (
	"context"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/extevict/extevict/extproc/extproctest"
)

var seeds = flag.Int("seeds", 300, "random interleavings to try")

// TestInterleavings lets evictions, ends of Process, clients that leave and messages collide, a few requests at a time
// through one Envoy. Whatever wins, each party's picture must fit the others', and nothing may be left.
func TestInterleavings(t *testing.T) {
	counts := map[string]int{}
	for seed := range *seeds {
		synctest.Test(t, func(t *testing.T) {
			r := rand.New(rand.NewPCG(uint64(seed), 0))
			pick := func(n int) int { return r.IntN(n) }
			m := []*modes{
				{}, {ResponseHeaderMode: skip}, {ResponseTrailerMode: send},
				{ResponseBodyMode: streamed}, {ResponseBodyMode: streamed, RequestBodyMode: streamed, ResponseTrailerMode: send},
				{ResponseBodyMode: buffered, RequestBodyMode: buffered}, {ResponseBodyMode: partial},
				{ResponseBodyMode: duplex, ResponseTrailerMode: send, RequestBodyMode: duplex, RequestTrailerMode: send},
			}[pick(8)]
			quirks := extproctest.Quirks{
				HangUp:      extproctest.HangUp(pick(3)),
				KeepSending: pick(4) == 0,
				Window:      1 + pick(3),
			}
			if pick(2) == 0 {
				quirks.Pause = func() { time.Sleep(time.Duration(rand.IntN(4)) * time.Microsecond) }
			}
			const n = 3
			type plan struct {
				tokens                   int
				gap, evict, leave, ender time.Duration // 0: never
				trailer                  bool
			}
			plans := make([]plan, n)
			for i := range plans {
				p := plan{tokens: pick(4), gap: time.Duration(pick(6)) * time.Microsecond, trailer: pick(3) == 0}
				for _, d := range []*time.Duration{&p.evict, &p.leave, &p.ender} {
					if pick(2) == 0 {
						*d = time.Duration(1+pick(30)) * time.Microsecond
					}
				}
				plans[i] = p
			}
			entries := make(chan extproctest.Entry, n)
			envoy := &extproctest.Envoy{
				Config: mode(m),
				Quirks: quirks,
				Errorf: func(f string, a ...any) {
					if s := fmt.Sprintf(f, a...); !strings.Contains(s, "FULL_DUPLEX_STREAMED body") { // an early end
						t.Errorf("seed %d: %s", seed, s)
					}
				},
				AccessLog: func(e extproctest.Entry) { entries <- e },
				Server: serverFunc(func(st stream) error {
					turn := make(chan struct{}, 1) // to send; a mutex would stop the bubble's clock
					evicted := false
					first, err := st.Recv()
					if err != nil {
						return nil
					}
					var p plan
					for _, h := range first.GetRequestHeaders().GetHeaders().GetHeaders() {
						if h.Key == "x-plan" {
							p = plans[h.RawValue[0]-'0']
						}
					}
					if p.evict > 0 {
						defer time.AfterFunc(p.evict, func() {
							turn <- struct{}{}
							defer func() { <-turn }()
							if !evicted {
								evicted = true
								st.Send(evict())
							}
						}).Stop()
					}
					start := time.Now()
					for r := first; err == nil; r, err = st.Recv() {
						turn <- struct{}{}
						if !evicted {
							st.Send(echo(r, m.ResponseBodyMode == duplex))
						}
						<-turn
						if p.ender > 0 && time.Since(start) > p.ender {
							return nil
						}
					}
					return nil
				}),
				Upstream: extproctest.Handler(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					io.Copy(io.Discard, r.Body)
					p := plans[r.Header.Get("X-Plan")[0]-'0']
					if p.trailer {
						w.Header().Set("Trailer", "X-Usage")
					}
					time.Sleep(p.gap)
					for i := range p.tokens {
						fmt.Fprint(w, i)
						w.(http.Flusher).Flush()
						time.Sleep(p.gap)
					}
					w.Header().Set("X-Usage", "7")
				})),
			}
			var wg sync.WaitGroup
			clients := make([]string, n)
			for i, p := range plans {
				wg.Go(func() {
					ctx, cancel := context.WithCancel(t.Context())
					defer cancel()
					if p.leave > 0 {
						time.AfterFunc(p.leave, cancel)
					}
					req := post("hello")().WithContext(ctx)
					req.Header.Set("X-Plan", fmt.Sprint(i))
					req.Header.Set("X-Request-Id", fmt.Sprint(i))
					clients[i] = readAll(envoy.RoundTrip(req))
				})
			}
			wg.Wait()
			for range n {
				e := <-entries
				var i int
				fmt.Sscan(e.RequestID, &i)
				got, all := clients[i], "200 "+"0123"[:plans[i].tokens]
				if plans[i].trailer {
					all += " X-Usage=7"
				}
				text := fmt.Sprintf("seed %d: client %q, %+v\n%v %+v %+v", seed, got, e, m, plans[i], quirks)
				what := ""
				switch {
				case e.Code == 429:
					what = "answered"
					if got != `429 {"error":1}` && got != "429  canceled" || !e.Complete || e.Details != "evicted_by_test" {
						t.Error(text)
					}
				case strings.HasSuffix(got, " reset"):
					what = "reset"
					if e.Complete || e.Details != "evicted_by_test" || !strings.HasPrefix(all, strings.TrimSuffix(got, " reset")) {
						t.Error(text)
					}
				case strings.HasSuffix(got, "canceled"):
					what = "left"
					if e.Details == "via_upstream" && !e.Complete {
						t.Error(text)
					}
				default:
					what = "whole"
					if got != all && !(m.ResponseBodyMode == duplex && plans[i].ender > 0) {
						t.Error(text)
					}
					if !e.Complete || e.Details != "via_upstream" {
						t.Error(text)
					}
				}
				counts[what]++
			}
			time.Sleep(time.Second)
		})
		if t.Failed() {
			return
		}
	}
	t.Log(counts)
	for _, what := range []string{"answered", "reset", "left", "whole"} {
		if counts[what] < *seeds/50 {
			t.Errorf("only %d requests were %s", counts[what], what)
		}
	}
}
