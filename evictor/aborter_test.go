package evictor_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
)

// An aborter is a fleet's Aborter: what it does to whom.
type aborter struct {
	f     *fleet
	does  map[string]func(context.Context) error
	calls atomic.Int32
}

func (a *aborter) Abort(ctx context.Context, h *abort.Handle, _ abort.Reason) error {
	a.calls.Add(1)
	if f := a.does[a.f.names[h]]; f != nil {
		return f(ctx)
	}
	return nil
}

// withAborter returns a fleet and its Aborter.
func withAborter(t testing.TB, opts ...evictor.Option) (*fleet, *aborter) {
	a := &aborter{does: map[string]func(context.Context) error{}}
	a.f = newFleet(t, append(opts, evictor.WithAborter(a))...)
	return a.f, a
}

// fails makes the Aborter fail for the names.
func (a *aborter) fails(err error, names ...string) {
	for _, n := range names {
		a.does[n] = func(context.Context) error { return err }
	}
}

// sorted evicts and returns the sorted names of the victims: of several Aborters at a
// time, any may be first.
func (f *fleet) sorted(ctx context.Context, d evictor.Demand) (string, error) {
	hs, err := f.Evict(ctx, d)
	names := strings.Fields(f.name(hs))
	slices.Sort(names)
	return strings.Join(names, " "), err
}

// A failing Aborter costs its victim's turn, nobody else's.
func TestAborterFails(t *testing.T) {
	no := errors.New("no")
	for _, way := range ways[:len(ways)-1] {
		for _, tc := range []struct {
			name  string
			n     int
			fails string
			want  string
			calls int32
		}{
			{"nobody", 2, "", "d e", 2},
			{"the first", 2, "e", "c d", 3},
			{"N others are evicted", 3, "e", "b c d", 4},
			{"the first two", 1, "d e", "c", 3},
			{"the last", 5, "a", "b c d e", 5},
			{"all but one", 1, "b c d e", "a", 5},
			{"all", 1, "a b c d e", "", 5},
		} {
			t.Run(way.name+"/"+tc.name, func(t *testing.T) {
				f, a := withAborter(t, way.opts...)
				for _, n := range []string{"a", "b", "c", "d", "e"} {
					f.track(n, at("x", -1))
				}
				bad := strings.Fields(tc.fails)
				a.fails(no, bad...)
				d := evictor.Demand{N: tc.n}
				way.do(&d)
				got, err := f.sorted(t.Context(), d)
				f.want("victims", tc.want, got)
				if errors.Is(err, no) != (len(bad) > 0) || err != nil && strings.Count(err.Error(), "evictor: no") != len(bad) {
					t.Errorf("error %v, want %d joined", err, len(bad))
				}
				if a.calls.Load() != tc.calls {
					t.Errorf("%d calls of the Aborter, want %d", a.calls.Load(), tc.calls)
				}
				// Who was spared is tracked further, at its old place.
				var rest []string
				for _, n := range []string{"e", "d", "c", "b", "a"} {
					if !slices.Contains(strings.Fields(tc.want), n) {
						rest = append(rest, n)
						if f.all[n].Outcome() != abort.Pending {
							t.Errorf("%s is %v", n, f.all[n].Outcome())
						}
					}
				}
				f.want("candidates", strings.Join(rest, " "), f.candidates("x"))
				f.wantLen("the rest", len(rest))
				clear(a.does)
				f.want("next victims", strings.Join(rest, " "), f.each(evictor.Demand{N: 1}))
			})
		}
	}
}

// each evicts one by one until nobody is left, and returns the victims in that order.
func (f *fleet) each(d evictor.Demand) string {
	f.t.Helper()
	var names []string
	for {
		n := f.evict(d)
		if n == "" {
			return strings.Join(names, " ")
		}
		names = append(names, n)
	}
}

// TestPutBackKeepsItsPlace: between others that come and go meanwhile.
func TestPutBackKeepsItsPlace(t *testing.T) {
	f, a := withAborter(t)
	for _, n := range []string{"a", "b", "c", "d"} {
		f.track(n, at("x", -1), at("y", -1))
	}
	a.does["c"] = func(context.Context) error {
		f.all["d"].own.Settle(abort.Completed)
		f.track("e", at("x", -1), at("y", -1))
		f.track("low", at("x", -2))
		return errors.New("no")
	}
	got, err := f.sorted(t.Context(), evictor.Demand{N: 1, Spare: func(h *abort.Handle) bool { return f.names[h] != "c" }})
	if got != "" || err == nil {
		t.Errorf("victims %q, error %v", got, err)
	}
	f.want("at x", "low e c b a", f.candidates("x"))
	f.want("at y", "e c b a", f.candidates("y"))
	f.wantLen("all", 5)
}

// TestRetrackWhileClaimed: it is not lost, and put back as it is described by then.
func TestRetrackWhileClaimed(t *testing.T) {
	for _, tc := range []struct {
		name     string
		then     []abort.Request
		fail     bool
		at       map[string]string
		n        int
		anywhere string
	}{
		{"another endpoint", []abort.Request{at("new", -1)}, true, map[string]string{"old": "y", "old2": "", "new": "x"}, 2, "x y"},
		{"higher priority", []abort.Request{at("old", 7)}, true, map[string]string{"old": "y x", "old2": ""}, 2, "y x"},
		{"lower priority", []abort.Request{at("old2", -7)}, true, map[string]string{"old": "y", "old2": "x"}, 2, "x y"},
		{"none", nil, true, map[string]string{"old": "y", "old2": ""}, 1, "y"},
		{"evicted all the same", []abort.Request{at("new", 7)}, false, map[string]string{"old": "y", "old2": "", "new": ""}, 1, "y"},
		{"none, and evicted all the same", nil, false, map[string]string{"old": "y", "old2": ""}, 1, "y"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f, a := withAborter(t)
			f.track("y", at("old", -1))
			f.track("x", at("old", -1), at("old2", -1))
			a.does["x"] = func(context.Context) error {
				f.track("x", tc.then...)
				if hs, _ := f.Evict(context.Background(), evictor.Demand{N: 9, Below: math.MaxInt, DryRun: true}); f.name(hs) != "y" {
					t.Errorf("while it is claimed, %q are candidates", f.name(hs))
				}
				if tc.fail {
					return errors.New("no")
				}
				return nil
			}
			a.fails(errors.New("not y"), "y")
			got, _ := f.sorted(t.Context(), evictor.Demand{N: 1, Endpoint: "old"})
			want := "x"
			if tc.fail {
				want = ""
			}
			f.want("victims", want, got)
			for e, want := range tc.at {
				f.want("at "+e, want, f.candidates(e))
			}
			f.want("anywhere", tc.anywhere, f.candidates(""))
			f.wantLen("all", tc.n)
		})
	}
}

// Invariant 6: a request whose priority was raised between a demand's choice and its
// claim is no victim.
func TestRetrackBetweenChoiceAndClaim(t *testing.T) {
	for _, fail := range []bool{false, true} {
		t.Run(fmt.Sprintf("claimed by another meanwhile %v", fail), func(t *testing.T) {
			f, a := withAborter(t)
			f.track("y", at("e", -1))
			x := f.track("x", at("e", -1))
			once := false
			d := evictor.Demand{N: 1, Endpoint: "e", Spare: func(h *abort.Handle) bool {
				if f.names[h] == "x" && !once {
					once = true
					if fail {
						a.does["x"] = func(context.Context) error { f.track("x", at("e", 5)); return errors.New("no") }
						f.Evict(context.Background(), evictor.Demand{N: 1, Spare: func(h *abort.Handle) bool { return f.names[h] != "x" }})
						delete(a.does, "x")
					} else {
						f.track("x", at("e", 5))
					}
				}
				return false
			}}
			f.want("victims", "y", f.evict(d))
			if x.Outcome() != abort.Pending || f.candidates("e") != "x" {
				t.Errorf("x is %v, candidates %q", x.Outcome(), f.candidates("e"))
			}
		})
	}
}

// TestClaimedMeanwhile: a request that another demand claimed since it was chosen is left
// to that.
func TestClaimedMeanwhile(t *testing.T) {
	f, a := withAborter(t)
	f.track("y", at("e", -1))
	f.track("x", at("e", -1))
	claimed, release, first := make(chan struct{}), make(chan struct{}), make(chan string)
	a.does["x"] = func(context.Context) error { close(claimed); <-release; return nil } // panics if called twice
	f.want("victims of the second", "y", f.evict(evictor.Demand{N: 1, Spare: func(h *abort.Handle) bool {
		if f.names[h] == "x" {
			go func() { first <- f.evict(evictor.Demand{N: 1}) }()
			<-claimed
		}
		return false
	}}))
	close(release)
	f.want("victims of the first", "x", <-first)
	if n := a.calls.Load(); n != 2 {
		t.Errorf("%d calls of the Aborter", n)
	}
	f.wantLen("all evicted", 0)
}

// Invariant 6: calls of TrackRequests that cross leave the request listed as its handle
// describes it.
func TestRetracksCross(t *testing.T) {
	for range *rounds {
		ev := evictor.New(evictor.WithAborter(abort.AborterFunc(func(context.Context, *abort.Handle, abort.Reason) error { return errors.New("no") })))
		own, ctx := abort.New(context.Background())
		ev.TrackRequests(ctx, at("low", -1))
		together(
			func() { ev.TrackRequests(ctx, at("high", 5)) },
			func() { ev.TrackRequests(ctx, at("low", -1)) },
			func() { ev.Evict(context.Background(), evictor.Demand{N: 1}) }, // claims, and puts back
			func() { ev.TrackRequests(ctx) },
		)
		found := func(d evictor.Demand) int {
			d.N, d.DryRun = 1, true
			hs, _ := ev.Evict(context.Background(), d)
			return len(hs)
		}
		low, high := 0, 0
		if reqs := own.Handle().Requests(); len(reqs) > 0 && reqs[0].Priority < 0 {
			low = 1
		} else if len(reqs) > 0 {
			high = 1
		}
		if found(evictor.Demand{}) != low || found(evictor.Demand{Below: 9}) != low+high || ev.Len() != low+high ||
			found(evictor.Demand{Below: 9, Endpoint: "low"}) != low || found(evictor.Demand{Below: 9, Endpoint: "high"}) != high {
			t.Fatalf("described as %v, listed otherwise", own.Handle().Requests())
		}
		own.Close()
		if ev.Len() != 0 {
			t.Fatalf("Len = %d", ev.Len())
		}
	}
}

// TestFinishedWhileClaimed: a finished request can't come back, and the next is taken.
func TestFinishedWhileClaimed(t *testing.T) {
	no := errors.New("no")
	for name, end := range map[string]func(*request){
		"completed":       func(r *request) { r.own.Settle(abort.Completed) },
		"closed":          func(r *request) { r.own.Close() },
		"client left":     func(r *request) { r.leave() },
		"somebody's else": func(r *request) { r.Abort(abort.Canceled) },
	} {
		for _, ret := range []error{nil, no} {
			for _, way := range ways[:len(ways)-1] {
				t.Run(fmt.Sprintf("%s/%v/%s", name, ret, way.name), func(t *testing.T) {
					f, a := withAborter(t, way.opts...)
					f.track("next", at("e", -1))
					x := f.track("x", at("e", -1))
					a.does["x"] = func(context.Context) error { end(x); return ret }
					d := evictor.Demand{N: 1}
					way.do(&d)
					got, err := f.sorted(t.Context(), d)
					f.want("victims", "next", got)
					if !errors.Is(err, ret) {
						t.Errorf("error %v, want %v", err, ret)
					}
					if e, ok := x.Err().(*abort.Error); ok && e.Reason != abort.Canceled {
						t.Errorf("x was aborted for %s", e.Reason)
					}
					f.want("candidates", "", f.candidates(""))
					f.track("x", at("e", -1))
					x.own.Close()
					f.wantLen("all over", 0)
				})
			}
		}
	}
}

// TestAborterHangs: Evict returns when the demand's context is done; the Aborter then
// decides about its request alone.
func TestAborterHangs(t *testing.T) {
	for _, way := range ways[:len(ways)-1] {
		for _, later := range []error{nil, errors.New("no")} {
			t.Run(fmt.Sprintf("%s/later %v", way.name, later), func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					f, a := withAborter(t, way.opts...)
					for i := range 20 {
						f.track(fmt.Sprint(i), at("e", -1))
					}
					x := f.all["7"]
					a.does["7"] = func(context.Context) error { time.Sleep(time.Hour); return later }
					ctx, cancel := context.WithTimeout(context.Background(), time.Second)
					defer cancel()
					start := time.Now()
					d := evictor.Demand{N: 20}
					way.do(&d)
					hs, err := f.Evict(ctx, d)
					if took := time.Since(start); took != time.Second {
						t.Errorf("Evict took %v", took)
					}
					if len(hs) != 19 || slices.Contains(hs, x.Handle) {
						t.Errorf("%d evicted, want the 19 others", len(hs))
					}
					if !errors.Is(err, context.DeadlineExceeded) {
						t.Errorf("error %v", err)
					}
					f.want("candidates while it hangs", "", f.candidates(""))
					f.want("victims while it hangs", "", f.evict(evictor.Demand{N: 1}))
					if x.Outcome() != abort.Pending {
						t.Errorf("x is %v", x.Outcome())
					}
					f.wantLen("it hangs", 1)
					time.Sleep(2 * time.Hour)
					synctest.Wait()
					if later == nil {
						f.wantLen("signalled later", 0)
						if x.Outcome() != abort.Aborted {
							t.Errorf("x is %v", x.Outcome())
						}
						return
					}
					f.wantLen("failed later", 1)
					delete(a.does, "7")
					f.want("victims", "7", f.evict(evictor.Demand{N: 1}))
				})
			})
		}
	}
}

// TestAborterIsBounded: an Aborter that honours its context gives up with the demand,
// and its victim is tracked further.
func TestAborterIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, a := withAborter(t)
		for i := range 40 {
			n := fmt.Sprint(i)
			f.track(n, at("e", -1))
			a.does[n] = func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		hs, err := f.Evict(ctx, evictor.Demand{N: 40})
		if len(hs) != 0 || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%d evicted, error %v", len(hs), err)
		}
		synctest.Wait()
		f.wantLen("all", 40)
		clear(a.does)
		if hs, err := f.Evict(t.Context(), evictor.Demand{N: 40}); len(hs) != 40 || err != nil {
			t.Errorf("later: %d evicted, error %v", len(hs), err)
		}
	})
}

// TestResultsInTime: whoever was ended before the demand's end is returned, although
// another Aborter hangs.
func TestResultsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, a := withAborter(t)
		for i := range 8 {
			f.track(fmt.Sprint(i), at("e", -1))
		}
		ctx, cancel := context.WithCancel(context.Background())
		a.does["7"] = func(context.Context) error {
			synctest.Wait() // until the others have returned
			cancel()
			time.Sleep(time.Second)
			return nil
		}
		if got, err := f.sorted(ctx, evictor.Demand{N: 8}); got != "0 1 2 3 4 5 6" || !errors.Is(err, context.Canceled) {
			t.Errorf("victims %q, error %v", got, err)
		}
		time.Sleep(time.Minute)
	})
}

// TestAbortersAtATime: many Aborters don't wait for each other, and don't come all at once.
func TestAbortersAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f, a := withAborter(t)
		var now, peak atomic.Int32
		for i := range 100 {
			n := fmt.Sprint(i)
			f.track(n, at("e", -1))
			a.does[n] = func(context.Context) error {
				peak.Store(max(peak.Load(), now.Add(1)))
				time.Sleep(time.Second)
				now.Add(-1)
				return nil
			}
		}
		start := time.Now()
		hs, err := f.Evict(t.Context(), evictor.Demand{N: 100})
		if len(hs) != 100 || err != nil {
			t.Errorf("%d evicted, %v", len(hs), err)
		}
		if took := time.Since(start); took > 10*time.Second || peak.Load() < 4 || peak.Load() > 64 {
			t.Errorf("%v for 100 seconds of Aborters, %d at a time", took, peak.Load())
		}
	})
}

// Invariant 7, panics: who runs user code that panics loses its turn; others don't.
func TestPanics(t *testing.T) {
	boom := func() { panic("boom") }
	for _, tc := range []struct {
		name    string
		in      string // whose panic
		do      func()
		evicted bool // x is
	}{
		{"Aborter panics", "Aborter", boom, false},
		{"Aborter panics with an error", "Aborter", func() { panic(errors.New("boom")) }, false},
		{"Aborter ends its goroutine", "Aborter", runtime.Goexit, false},
		{"Aborter has x aborted, then panics", "Aborter", nil, false},
		{"hook panics", "hook", boom, true},
		{"hook ends its goroutine", "hook", runtime.Goexit, true},
	} {
		for _, way := range ways[:len(ways)-1] {
			t.Run(tc.name+"/"+way.name, func(t *testing.T) {
				f, a := withAborter(t, way.opts...)
				for _, n := range []string{"c", "b", "x", "a"} {
					f.track(n, at("e", -1))
				}
				x := f.all["x"]
				if tc.in == "hook" {
					x.OnSettle(func(abort.Outcome) { tc.do() })
				} else {
					a.does["x"] = func(context.Context) error {
						if tc.do == nil {
							x.Abort(abort.Canceled)
							panic("boom")
						}
						tc.do()
						return nil
					}
				}
				d := evictor.Demand{N: 3}
				way.do(&d)
				var got string
				var err error
				within(t, func() { got, err = f.sorted(context.Background(), d) })
				want := "a b c"
				if tc.evicted {
					want = "a b x"
				}
				f.want("victims", want, got)
				if err == nil || !strings.Contains(err.Error(), "evictor: panic in "+tc.in+": ") {
					t.Errorf("error %v", err)
				}
				clear(a.does)
				within(t, func() { f.evict(evictor.Demand{N: 9}) })
				f.wantLen("all evicted", 0)
			})
		}
	}
	t.Run("without an Aborter", func(t *testing.T) {
		f := newFleet(t)
		for i := range 3 {
			f.track(fmt.Sprint(i), at("e", -1)).OnSettle(func(abort.Outcome) { panic("boom") })
		}
		hs, err := f.Evict(t.Context(), evictor.Demand{N: 3})
		if f.name(hs) != "2 1 0" || err == nil || strings.Count(err.Error(), "boom") != 3 {
			t.Errorf("victims %q, error %v", f.name(hs), err)
		}
		f.wantLen("all evicted", 0)
	})
	t.Run("nil AborterFunc", func(t *testing.T) {
		f := newFleet(t, evictor.WithAborter(abort.AborterFunc(nil)))
		x := f.track("x", at("e", -1))
		hs, err := f.Evict(t.Context(), evictor.Demand{N: 3})
		if len(hs) != 0 || err == nil || x.Outcome() != abort.Pending {
			t.Errorf("victims %q, error %v", f.name(hs), err)
		}
	})
	// Order and Spare run for the caller of Evict, and panic to it.
	t.Run("order", func(t *testing.T) {
		f := newFleet(t, evictor.WithOrder(func(a, b evictor.Victim) int { panic("boom") }))
		f.track("x", at("e", -1))
		f.track("y", at("e", -1))
		if p := panics(func() { f.evict(evictor.Demand{N: 1}) }); p != "boom" {
			t.Errorf("panic %v", p)
		}
		within(t, func() { f.all["x"].own.Close(); f.track("z", at("e", -1)) })
		f.wantLen("afterwards", 2)
	})
	t.Run("Spare", func(t *testing.T) {
		f := newFleet(t)
		f.track("x", at("e", -1))
		if p := panics(func() { f.evict(evictor.Demand{N: 1, Spare: func(*abort.Handle) bool { panic("boom") }}) }); p != "boom" {
			t.Errorf("panic %v", p)
		}
		within(t, func() { f.want("victims", "x", f.evict(evictor.Demand{N: 1})) })
	})
}

// Invariant 7: no user code runs under a lock: all of it may call every method, on the
// request in question too.
func TestUserCodeCallsBack(t *testing.T) {
	var f *fleet
	calls := 0
	everything := func(h *abort.Handle) {
		calls++
		r := f.all[f.names[h]]
		f.TrackRequests(r.ctx, at("e", -1))
		f.Len()
		for h := range f.All() {
			h.Progress()
		}
		f.Evict(context.Background(), evictor.Demand{N: 9, Below: -50}) // somebody else
		f.Evict(context.Background(), evictor.Demand{N: 9, DryRun: true, Below: -50, Spare: func(*abort.Handle) bool { return false }})
		own, ctx := abort.New(context.Background())
		f.TrackRequests(ctx, at("e", -99))
		own.Close()
		h.Requests()
		h.OnSettle(func(abort.Outcome) {})
	}
	for _, tc := range []struct {
		name string
		opts []evictor.Option
		d    evictor.Demand
		hook bool
	}{
		{"Aborter", []evictor.Option{evictor.WithAborter(abort.AborterFunc(func(_ context.Context, h *abort.Handle, _ abort.Reason) error {
			if f.names[h] == "x" {
				everything(h)
			}
			return nil
		}))}, evictor.Demand{N: 1}, false},
		{"order", []evictor.Option{evictor.WithOrder(func(a, b evictor.Victim) int {
			if len(a.Requests) == 0 || len(b.Requests) == 0 || a.Progress.Start.IsZero() {
				t.Error("an order sees a victim without description or progress")
			}
			everything(a.Handle)
			everything(b.Handle)
			return 0
		})}, evictor.Demand{N: 1}, false},
		{"Spare", nil, evictor.Demand{N: 1, Spare: func(h *abort.Handle) bool { everything(h); return false }}, false},
		{"hook", nil, evictor.Demand{N: 1}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f, calls = newFleet(t, tc.opts...), 0
			f.track("y", at("e", -1))
			x := f.track("x", at("e", -1))
			f.track("low", at("e", -99))
			if tc.hook {
				x.OnSettle(func(abort.Outcome) { everything(x.Handle) })
			}
			f.all["low"].own.Settle(abort.Completed)
			within(t, func() { f.Evict(context.Background(), tc.d) })
			if calls == 0 {
				t.Error("never called")
			}
		})
	}
}

// Invariant 7: user code that sleeps holds up nobody but its own demand.
func TestUserCodeSleeps(t *testing.T) {
	wake := make(chan struct{})
	sleeping := make(chan struct{}, 10)
	sleep := func() { sleeping <- struct{}{}; <-wake }
	var f *fleet
	type sleeper struct {
		name string
		opts []evictor.Option
		d    evictor.Demand
		hook bool
	}
	for _, tc := range []sleeper{
		{"Aborter", []evictor.Option{evictor.WithAborter(abort.AborterFunc(func(_ context.Context, h *abort.Handle, _ abort.Reason) error {
			if f.names[h] == "x" {
				sleep()
			}
			return nil
		}))}, evictor.Demand{N: 1}, false},
		{"order", []evictor.Option{evictor.WithOrder(func(a, b evictor.Victim) int {
			if f.names[b.Handle] == "x" || f.names[a.Handle] == "x" {
				sleep()
			}
			return 0
		})}, evictor.Demand{N: 1}, false},
		{"Spare", nil, evictor.Demand{N: 1, Spare: func(h *abort.Handle) bool { sleep(); return false }}, false},
		{"hook", nil, evictor.Demand{N: 1}, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f = newFleet(t, tc.opts...)
			f.track("y", at("e", -1))
			x := f.track("x", at("e", -1))
			if tc.hook {
				x.OnSettle(func(abort.Outcome) { sleep() })
			}
			done := make(chan struct{})
			ev := f.Evictor
			go func() { defer close(done); ev.Evict(context.Background(), tc.d) }()
			<-sleeping
			f.begin("low")
			within(t, func() {
				f.track("low", at("low", -99))
				f.want("victims", "low", f.evict(evictor.Demand{N: 1, Below: -50}))
				f.track("y", at("f", -1))
				f.all["y"].own.Settle(abort.Completed)
				f.Len()
				for range f.All() {
				}
			})
			close(wake)
			<-done
			wake = make(chan struct{})
			for len(sleeping) > 0 {
				<-sleeping
			}
		})
	}
}
