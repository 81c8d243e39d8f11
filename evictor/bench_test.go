package evictor_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"testing"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
)

var sizes = []int{1, 1_000, 10_000, 100_000, 1_000_000}

// live is one request in flight.
type live struct {
	own *abort.Owner
	ctx context.Context
}

func begin(n int) []live {
	ls := make([]live, n)
	for i := range ls {
		ls[i].own, ls[i].ctx = abort.New(context.Background())
	}
	return ls
}

// described is the i-th request: 64 endpoints, 8 priorities.
func described(i int) abort.Request {
	return abort.Request{ID: "x", Endpoint: endpoints[i%64], Priority: -i%8 - 1, Tokens: int64(i%1000 + 1)}
}

var endpoints = func() (s [64]string) {
	for i := range s {
		s[i] = fmt.Sprintf("10.0.0.%d:8000", i)
	}
	return s
}()

// byID is the baseline: what a tracker without handles has, a mutex and a map.
type byID struct {
	mu  sync.Mutex
	ids map[string]abort.Request
}

func (m *byID) track(id string, r abort.Request) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.ids[id] = r
}

func (m *byID) finish(id string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.ids, id)
}

// BenchmarkTrackFinish is one request that comes and goes beside others in flight: what
// tracking adds to its handle, and the same with a map.
func BenchmarkTrackFinish(b *testing.B) {
	const batch = 4096
	for _, n := range sizes {
		b.Run(fmt.Sprintf("tracked/%d", n), func(b *testing.B) {
			var ev evictor.Evictor
			all := begin(n)
			for i, l := range all {
				ev.TrackRequests(l.ctx, described(i))
			}
			b.ReportAllocs()
			var ls []live
			for i := 0; b.Loop(); i++ {
				if i%batch == 0 {
					b.StopTimer()
					ls = begin(batch)
					b.StartTimer()
				}
				ev.TrackRequests(ls[i%batch].ctx, described(i))
				ls[i%batch].own.Settle(abort.Completed)
			}
			runtime.KeepAlive(all)
		})
		b.Run(fmt.Sprintf("handle alone/%d", n), func(b *testing.B) {
			b.ReportAllocs()
			var ls []live
			for i := 0; b.Loop(); i++ {
				if i%batch == 0 {
					b.StopTimer()
					ls = begin(batch)
					b.StartTimer()
				}
				abort.FromContext(ls[i%batch].ctx).Describe(described(i))
				ls[i%batch].own.Settle(abort.Completed)
			}
		})
		b.Run(fmt.Sprintf("map/%d", n), func(b *testing.B) {
			m := byID{ids: map[string]abort.Request{}}
			ids := make([]string, n+batch)
			for i := range ids {
				ids[i] = fmt.Sprintf("%036d", i)
				if i < n {
					m.track(ids[i], described(i))
				}
			}
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				id := ids[n+i%batch]
				m.track(id, described(i))
				m.finish(id)
			}
		})
	}
}

func BenchmarkTrackAgain(b *testing.B) {
	var ev evictor.Evictor
	all := begin(1000)
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		ev.TrackRequests(all[i%1000].ctx, described(i))
	}
}

// BenchmarkHeld reports the bytes that a tracked request holds beside its handle.
func BenchmarkHeld(b *testing.B) {
	for _, n := range sizes[1:] {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			var tracked, handles int64
			for b.Loop() {
				var ev evictor.Evictor
				before := heap()
				all := begin(n)
				handles = heap() - before
				before = heap()
				for i, l := range all {
					ev.TrackRequests(l.ctx, described(i))
				}
				tracked = heap() - before
				runtime.KeepAlive(&ev)
				runtime.KeepAlive(all)
			}
			b.ReportMetric(float64(tracked)/float64(n), "B/tracked")
			b.ReportMetric(float64(handles)/float64(n), "B/handle")
			b.ReportMetric(0, "ns/op")
		})
	}
}

// BenchmarkEvict is one Evict of k requests, signals included. For k = 0 the latest
// request is aborted by its handle: the difference is what it costs to choose.
func BenchmarkEvict(b *testing.B) {
	for _, k := range []int{0, 1, 100} {
		for _, n := range []int{1_000, 100_000, 1_000_000} {
			b.Run(fmt.Sprintf("%d of %d", k, n), func(b *testing.B) {
				var ev evictor.Evictor
				all := begin(n)
				for i, l := range all {
					ev.TrackRequests(l.ctx, described(i))
				}
				b.ReportAllocs()
				ctx := context.Background()
				more := all[n/2:] // the latest
				for left := len(more); b.Loop(); left -= max(k, 1) {
					if left < max(k, 1) {
						b.StopTimer()
						more = begin(n - n/2)
						for i, l := range more {
							ev.TrackRequests(l.ctx, described(i))
						}
						left = len(more)
						b.StartTimer()
					}
					if k == 0 {
						more[left-1].own.Handle().Abort(abort.Preempted)
						continue
					}
					hs, err := ev.Evict(ctx, evictor.Demand{N: k, Reason: abort.Preempted})
					if len(hs) != k || err != nil {
						b.Fatal(len(hs), err)
					}
				}
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*max(k, 1)), "ns/victim")
				runtime.KeepAlive(all)
			})
		}
	}
}

// BenchmarkPlanned is a dry run of a demand that looks at every candidate.
func BenchmarkPlanned(b *testing.B) {
	for _, n := range []int{1_000, 10_000, 100_000} {
		for _, bc := range []struct {
			name string
			opts []evictor.Option
			d    evictor.Demand
		}{
			{"N", nil, evictor.Demand{N: 1}},
			{"Tokens", nil, evictor.Demand{Tokens: 10_000}},
			{"order", []evictor.Option{evictor.WithOrder(func(a, b evictor.Victim) int { return int(a.Requests[0].Tokens - b.Requests[0].Tokens) })}, evictor.Demand{N: 1}},
		} {
			b.Run(fmt.Sprintf("%s/%d", bc.name, n), func(b *testing.B) {
				ev := evictor.New(bc.opts...)
				all := begin(n)
				for i, l := range all {
					ev.TrackRequests(l.ctx, described(i))
				}
				bc.d.DryRun = true
				b.ReportAllocs()
				for b.Loop() {
					ev.Evict(context.Background(), bc.d)
				}
				runtime.KeepAlive(all)
			})
		}
	}
}
