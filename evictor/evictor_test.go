package evictor_test

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	gocmp "github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
)

// rounds scales the randomised tests. Each round is one small collision.
var rounds = flag.Int("rounds", 2000, "rounds of each randomised test")

// together runs the functions at the same time, each after a pause too short for a
// timer, and returns when all have returned.
func together(fs ...func()) {
	var ready atomic.Int32
	var wg sync.WaitGroup
	for _, i := range rand.Perm(len(fs)) {
		f, pause := fs[i], rand.IntN(50)
		wg.Go(func() {
			for ready.Add(1); int(ready.Load()) < len(fs); {
				runtime.Gosched()
			}
			for range pause {
				ready.Load()
			}
			f()
		})
	}
	wg.Wait()
}

// within fails the test if f does not return: a deadlock on a mutex is nothing that a
// synctest bubble would notice.
func within(t *testing.T, f func()) {
	t.Helper()
	done := make(chan struct{})
	go func() { defer close(done); f() }()
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		t.Fatal("deadlock")
	}
}

// panics returns what f panics with, or nil.
func panics(f func()) (v any) {
	defer func() { v = recover() }()
	f()
	return nil
}

// request is one request in flight.
type request struct {
	*abort.Handle
	name  string
	own   *abort.Owner
	ctx   context.Context
	leave context.CancelFunc // its client's
}

// fleet is an Evictor and requests with names.
type fleet struct {
	*evictor.Evictor
	t     testing.TB
	all   map[string]*request
	names map[*abort.Handle]string
}

func newFleet(t testing.TB, opts ...evictor.Option) *fleet {
	return &fleet{evictor.New(opts...), t, map[string]*request{}, map[*abort.Handle]string{}}
}

// begin begins a request. It is over when the test is.
func (f *fleet) begin(name string) *request {
	parent, leave := context.WithCancel(context.Background())
	own, ctx := abort.New(parent)
	f.t.Cleanup(func() { own.Close(); leave() })
	r := &request{own.Handle(), name, own, ctx, leave}
	f.all[name], f.names[r.Handle] = r, name
	return r
}

// track tracks the request of that name, which it begins unless it runs.
func (f *fleet) track(name string, reqs ...abort.Request) *request {
	r := f.all[name]
	if r == nil {
		r = f.begin(name)
	}
	f.TrackRequests(r.ctx, reqs...)
	return r
}

// name returns the names of the handles, in order.
func (f *fleet) name(hs []*abort.Handle) string {
	var s []string
	for _, h := range hs {
		s = append(s, f.names[h])
	}
	return strings.Join(s, " ")
}

// evict evicts and returns the victims' names.
func (f *fleet) evict(d evictor.Demand) string {
	f.t.Helper()
	hs, err := f.Evict(context.Background(), d)
	if err != nil {
		f.t.Errorf("Evict: %v", err)
	}
	for _, h := range hs {
		if (h.Outcome() == abort.Aborted) == d.DryRun {
			f.t.Errorf("victim %s is %v", f.names[h], h.Outcome())
		}
	}
	return f.name(hs)
}

// candidates returns the names of those who may be chosen at the endpoint, in order.
func (f *fleet) candidates(endpoint string) string {
	f.t.Helper()
	return f.evict(evictor.Demand{N: math.MaxInt, Below: math.MaxInt, Endpoint: endpoint, DryRun: true})
}

func (f *fleet) want(what, want, got string) {
	f.t.Helper()
	if diff := gocmp.Diff(want, got); diff != "" {
		f.t.Errorf("%s (-want +got)\n%s", what, diff)
	}
}

func (f *fleet) wantLen(what string, want int) {
	f.t.Helper()
	if got := f.Len(); got != want {
		f.t.Errorf("%s: Len = %d, want %d", what, got, want)
	}
}

// at is a request at an endpoint.
func at(endpoint string, priority int) abort.Request {
	return abort.Request{Endpoint: endpoint, Priority: priority, Tokens: 1}
}

// ways are the ways to choose, which must agree on everything but the order.
var ways = []struct {
	name string
	opts []evictor.Option
	do   func(*evictor.Demand)
}{
	{"plain", nil, func(*evictor.Demand) {}},
	{"with an order", []evictor.Option{evictor.WithOrder(func(a, b evictor.Victim) int { return 0 })}, func(*evictor.Demand) {}},
	{"with Spare", nil, func(d *evictor.Demand) { d.Spare = func(*abort.Handle) bool { return false } }},
	{"with Before", nil, func(d *evictor.Demand) { d.Before = abort.Streaming }},
	{"with Tokens", nil, func(d *evictor.Demand) { d.Tokens = int64(d.N) }}, // each request holds 1
	{"with Tokens alone", nil, func(d *evictor.Demand) { d.Tokens, d.N = int64(d.N), 0 }},
	{"with an Aborter", []evictor.Option{evictor.WithAborter(abort.AborterFunc(
		func(context.Context, *abort.Handle, abort.Reason) error { return nil }))}, func(*evictor.Demand) {}},
}

func TestZeroDemand(t *testing.T) {
	f := newFleet(t)
	f.track("a", at("e", math.MinInt))
	for _, d := range []evictor.Demand{
		{},
		{Below: math.MaxInt},
		{N: -1, Below: math.MaxInt},
		{Tokens: -1, Below: math.MaxInt},
		{N: math.MinInt, Tokens: math.MinInt64, Below: math.MaxInt},
		{Below: math.MaxInt, Endpoint: "e", Before: abort.Streaming, Reason: abort.Preempted},
		{Below: math.MaxInt, DryRun: true},
		{Below: math.MaxInt, Spare: func(*abort.Handle) bool { t.Error("Spare called"); return false }},
	} {
		f.want(fmt.Sprintf("%+v", d), "", f.evict(d))
	}
	f.wantLen("after nothing", 1)
}

func TestZeroEvictor(t *testing.T) {
	f := &fleet{&evictor.Evictor{}, t, map[string]*request{}, map[*abort.Handle]string{}}
	f.want("empty", "", f.evict(evictor.Demand{N: 1, Below: math.MaxInt}))
	f.want("empty, at an endpoint", "", f.evict(evictor.Demand{N: 1, Below: math.MaxInt, Endpoint: "e"}))
	f.want("empty, tokens", "", f.evict(evictor.Demand{Tokens: 1, Below: math.MaxInt}))
	f.wantLen("empty", 0)
	for range f.All() {
		t.Error("All: somebody")
	}
	f.track("a", at("e", -1))
	f.want("one", "a", f.evict(evictor.Demand{N: 1}))
}

func TestMisuse(t *testing.T) {
	for _, tc := range []struct {
		name string
		f    func()
		want any
	}{
		{"nil Aborter", func() { evictor.WithAborter(nil) }, "evictor: WithAborter: nil Aborter"},
		{"nil order", func() { evictor.WithOrder(nil) }, "evictor: WithOrder: nil function"},
		{"nil Option", func() { evictor.New(nil) }, "evictor: nil Option"},
	} {
		if diff := gocmp.Diff(tc.want, panics(tc.f)); diff != "" {
			t.Errorf("%s: panic (-want +got)\n%s", tc.name, diff)
		}
	}
}

// TestNoHandle: a context without a handle is nobody's request.
func TestNoHandle(t *testing.T) {
	f := newFleet(t)
	f.TrackRequests(context.Background(), at("e", -1))
	f.wantLen("no handle", 0)
}

// Invariant 6: a victim's priority is strictly below the demand's, whoever wants more.
func TestBelow(t *testing.T) {
	priorities := []int{math.MinInt, -100, -1, 0, 1, 100, math.MaxInt}
	highestFirst := evictor.WithOrder(func(a, b evictor.Victim) int {
		return cmp.Compare(b.Requests[0].Priority, a.Requests[0].Priority)
	})
	for _, way := range append(ways, struct {
		name string
		opts []evictor.Option
		do   func(*evictor.Demand)
	}{"with an order that wants the highest", []evictor.Option{highestFirst}, func(*evictor.Demand) {}}) {
		for _, below := range priorities {
			t.Run(fmt.Sprintf("%s/%d", way.name, below), func(t *testing.T) {
				f := newFleet(t, way.opts...)
				want := 0
				for _, p := range priorities {
					f.track(fmt.Sprint(p), at("e", p))
					if p < below {
						want++
					}
				}
				for _, endpoint := range []string{"e", ""} {
					for n := want; n >= 0; n-- { // Tokens are all or nothing: ask for no more than there is
						d := evictor.Demand{N: n, Below: below, Endpoint: endpoint, DryRun: true}
						way.do(&d)
						hs, err := f.Evict(t.Context(), d)
						if err != nil || len(hs) != n {
							t.Errorf("N = %d at %q: %q, %v", n, endpoint, f.name(hs), err)
						}
					}
				}
				d := evictor.Demand{N: want + 1, Below: below}
				way.do(&d)
				if d.Tokens == 0 {
					f.evict(d)
				} else if got := f.evict(d); got != "" {
					t.Errorf("evicted %q for more than there is", got)
				} else {
					d.N, d.Tokens = 0, int64(want)
					f.evict(d)
				}
				for _, r := range f.all {
					if (r.Outcome() == abort.Aborted) != (r.Requests()[0].Priority < below) {
						t.Errorf("priority %d is %v", r.Requests()[0].Priority, r.Outcome())
					}
				}
				f.wantLen("the rest", len(priorities)-want)
			})
		}
	}
}

func TestOrder(t *testing.T) {
	type tracked struct {
		name string
		req  abort.Request
	}
	reqs := []tracked{
		{"old-2", at("a", -2)}, {"old-1", at("a", -1)}, {"mid-2", at("b", -2)}, {"mid-1", at("a", -1)}, {"new-2", at("a", -2)}, {"high", at("a", 3)},
	}
	byName := evictor.WithOrder(func(a, b evictor.Victim) int { return strings.Compare(a.Requests[0].ID, b.Requests[0].ID) })
	for _, tc := range []struct {
		name string
		opts []evictor.Option
		d    evictor.Demand
		want string
	}{
		{"lowest priority, then latest", nil, evictor.Demand{N: 9}, "new-2 mid-2 old-2 mid-1 old-1"},
		{"N", nil, evictor.Demand{N: 2}, "new-2 mid-2"},
		{"at an endpoint", nil, evictor.Demand{N: 9, Endpoint: "a"}, "new-2 old-2 mid-1 old-1"},
		{"at another", nil, evictor.Demand{N: 9, Endpoint: "b"}, "mid-2"},
		{"at an unknown endpoint", nil, evictor.Demand{N: 9, Endpoint: "z"}, ""},
		{"Below", nil, evictor.Demand{N: 9, Below: -1}, "new-2 mid-2 old-2"},
		{"own order", []evictor.Option{byName}, evictor.Demand{N: 9}, "mid-1 mid-2 new-2 old-1 old-2"},
		{"own order, N", []evictor.Option{byName}, evictor.Demand{N: 3}, "mid-1 mid-2 new-2"},
		{"own order, at an endpoint", []evictor.Option{byName}, evictor.Demand{N: 3, Endpoint: "a"}, "mid-1 new-2 old-1"},
		{"own order without opinion is the default", []evictor.Option{evictor.WithOrder(func(a, b evictor.Victim) int { return 0 })}, evictor.Demand{N: 9}, "new-2 mid-2 old-2 mid-1 old-1"},
		{"Spare", nil, evictor.Demand{N: 9, Spare: func(h *abort.Handle) bool { return strings.HasSuffix(h.Requests()[0].ID, "-2") }}, "mid-1 old-1"},
		{"Spare all", nil, evictor.Demand{N: 9, Spare: func(*abort.Handle) bool { return true }}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFleet(t, tc.opts...)
			for _, r := range reqs {
				r.req.ID = r.name
				f.track(r.name, r.req)
			}
			tc.d.DryRun = true
			f.want("dry run", tc.want, f.evict(tc.d))
			f.wantLen("dry run", len(reqs))
			tc.d.DryRun = false
			f.want("victims", tc.want, f.evict(tc.d))
			f.wantLen("the rest", len(reqs)-len(strings.Fields(tc.want)))
		})
	}
}

func TestReason(t *testing.T) {
	f := newFleet(t, evictor.WithAborter(abort.AborterFunc(func(_ context.Context, h *abort.Handle, r abort.Reason) error {
		if r != abort.Draining {
			t.Errorf("the Aborter is told %q", r)
		}
		return nil
	})))
	a := f.track("a", at("e", -1))
	f.evict(evictor.Demand{N: 1, Reason: abort.Draining})
	if e, ok := errors.AsType[*abort.Error](context.Cause(a.ctx)); !ok || e.Reason != abort.Draining {
		t.Errorf("cause = %v", context.Cause(a.ctx))
	}
}

func TestAll(t *testing.T) {
	f := newFleet(t)
	f.track("a", at("e", -1))
	f.track("b", at("e", 5))
	f.track("c", at("f", -1))
	f.track("d", at("f", -2)).leave()
	f.track("e", at("f", -2)).own.Settle(abort.Completed)
	var got []*abort.Handle
	for h := range f.All() {
		got = append(got, h)
	}
	f.want("All", "c a b", f.name(got))
	for h := range f.All() { // may end early, and change the Evictor
		within(t, func() { h.Abort(abort.Canceled); f.track("new", at("g", 0)); f.Len() })
		break
	}
	got = nil
	for h := range f.All() {
		got = append(got, h)
	}
	f.want("All", "a new b", f.name(got))
}

func TestLegs(t *testing.T) {
	prefill, decode := abort.Request{Endpoint: "prefill", Priority: -1, Tokens: 10}, abort.Request{Endpoint: "decode", Priority: -1, Tokens: 3}
	for _, tc := range []struct {
		name string
		reqs []abort.Request
		d    evictor.Demand
		want string
	}{
		{"found from the first", []abort.Request{prefill, decode}, evictor.Demand{N: 9, Endpoint: "prefill"}, "x"},
		{"found from the other", []abort.Request{prefill, decode}, evictor.Demand{N: 9, Endpoint: "decode"}, "x"},
		{"one victim anywhere", []abort.Request{prefill, decode}, evictor.Demand{N: 9}, "x"},
		{"not elsewhere", []abort.Request{prefill, decode}, evictor.Demand{N: 9, Endpoint: "z"}, ""},
		{"one endpoint twice", []abort.Request{prefill, prefill}, evictor.Demand{N: 9, Endpoint: "prefill"}, "x"},
		{"one endpoint twice, among others", []abort.Request{prefill, decode, prefill, decode}, evictor.Demand{N: 9, Endpoint: "decode"}, "x"},
		{"no endpoint", []abort.Request{{Priority: -1}}, evictor.Demand{N: 9}, "x"},
		{"no endpoint, elsewhere", []abort.Request{{Priority: -1}}, evictor.Demand{N: 9, Endpoint: "z"}, ""},
		{"the first speaks for the whole", []abort.Request{at("a", -1), at("b", 9)}, evictor.Demand{N: 9, Endpoint: "b"}, "x"},
		{"the others do not", []abort.Request{at("a", 9), at("b", -1)}, evictor.Demand{N: 9, Endpoint: "b"}, ""},
		{"tokens there", []abort.Request{prefill, decode}, evictor.Demand{Tokens: 10, Endpoint: "prefill"}, "x"},
		{"tokens there, too few", []abort.Request{prefill, decode}, evictor.Demand{Tokens: 4, Endpoint: "decode"}, ""},
		{"tokens of all legs", []abort.Request{prefill, decode}, evictor.Demand{Tokens: 13}, "x"},
		{"tokens of all legs, too few", []abort.Request{prefill, decode}, evictor.Demand{Tokens: 14}, ""},
		{"tokens of one endpoint twice", []abort.Request{decode, decode}, evictor.Demand{Tokens: 6, Endpoint: "decode"}, "x"},
		{"many", []abort.Request{at("a", -1), at("b", 0), at("c", 0), at("d", 0), at("e", 0)}, evictor.Demand{N: 9, Endpoint: "e"}, "x"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFleet(t)
			f.track("x", tc.reqs...)
			f.wantLen("tracked", 1)
			tc.d.DryRun = true
			f.want("dry run", tc.want, f.evict(tc.d))
			tc.d.DryRun = false
			f.want("victims", tc.want, f.evict(tc.d))
			if tc.want == "" {
				f.all["x"].own.Settle(abort.Completed)
			}
			f.wantLen("the end", 0)
			for _, r := range tc.reqs {
				f.want("left at "+r.Endpoint, "", f.candidates(r.Endpoint))
			}
		})
	}
}

func TestRetrack(t *testing.T) {
	for _, tc := range []struct {
		name     string
		then     []abort.Request
		at       map[string]string // candidates by endpoint
		anywhere string
	}{
		{"another endpoint", []abort.Request{at("n", -1)}, map[string]string{"a": "", "b": "y", "n": "x"}, "x y"},
		{"the same: the latest dispatch", []abort.Request{at("a", -1), at("b", -1)}, map[string]string{"a": "x", "b": "x y"}, "x y"},
		{"lower priority", []abort.Request{at("b", -3)}, map[string]string{"a": "", "b": "x y"}, "x y"},
		{"higher priority", []abort.Request{at("b", 3)}, map[string]string{"a": "", "b": "y x"}, "y x"},
		{"fewer legs", []abort.Request{at("a", -1)}, map[string]string{"a": "x", "b": "y"}, "x y"},
		{"more legs", []abort.Request{at("c", -1), at("d", -1), at("b", -1)}, map[string]string{"a": "", "b": "x y", "c": "x", "d": "x"}, "x y"},
		{"none", nil, map[string]string{"a": "", "b": "y"}, "y"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFleet(t)
			x := f.track("x", at("a", -1), at("b", -1))
			f.track("y", at("b", -1))
			f.want("at b", "y x", f.candidates("b"))
			check := func() {
				t.Helper()
				for e, want := range tc.at {
					f.want("at "+e, want, f.candidates(e))
				}
				f.want("anywhere", tc.anywhere, f.candidates(""))
				f.wantLen("retracked", len(strings.Fields(tc.anywhere)))
				if diff := gocmp.Diff(tc.then, slices.Clone(x.Requests()), gocmp.Comparer(slices.Equal[[]abort.Request])); diff != "" {
					t.Errorf("Requests (-want +got)\n%s", diff)
				}
			}
			f.track("x", tc.then...)
			check()
			f.track("x", tc.then...)
			check()
			f.track("x") // holds nothing for a while
			f.want("anywhere", "y", f.candidates(""))
			f.track("x", tc.then...)
			check()
			x.own.Settle(abort.Completed)
			f.track("x", at("a", -1))
			f.want("tracked when it had settled", "y", f.candidates(""))
			f.wantLen("tracked when it had settled", 1)
		})
	}
}

// TestTwoEvictors: they don't know each other.
func TestTwoEvictors(t *testing.T) {
	f, g := newFleet(t), newFleet(t)
	x := f.track("x", at("e", -1))
	g.TrackRequests(x.ctx, at("e", -1))
	f.wantLen("first", 1)
	g.wantLen("second", 1)
	f.want("victims", "x", f.evict(evictor.Demand{N: 1}))
	g.wantLen("second", 0)
}

// Invariant 2: ids of any shape change nothing.
func TestIDs(t *testing.T) {
	t.Run("eight with one id", func(t *testing.T) {
		f := newFleet(t)
		for i := range 8 {
			f.track(fmt.Sprint(i), abort.Request{ID: "same", Priority: -1})
		}
		f.all["4"].own.Settle(abort.Completed)
		f.wantLen("one is complete", 7)
		f.want("victims", "7 6 5 3", f.evict(evictor.Demand{N: 4}))
		f.wantLen("three are left", 3)
		for _, i := range []string{"0", "1", "2"} {
			if f.all[i].Outcome() != abort.Pending {
				t.Errorf("%s is %v", i, f.all[i].Outcome())
			}
		}
		f.want("victims", "2 1 0", f.evict(evictor.Demand{N: 4}))
	})
	t.Run("a retry before the first is gone", func(t *testing.T) {
		f := newFleet(t)
		f.track("first", abort.Request{ID: "same", Priority: -1})
		f.want("victims", "first", f.evict(evictor.Demand{N: 1}))
		f.track("retry", abort.Request{ID: "same", Priority: -1, Evictions: 1})
		f.all["first"].own.Close()
		f.wantLen("retry", 1)
		if f.all["retry"].Outcome() != abort.Pending {
			t.Error("the retry was hit")
		}
		f.want("victims", "retry", f.evict(evictor.Demand{N: 1}))
	})
	t.Run("an id of any shape", func(t *testing.T) {
		f := newFleet(t)
		ids := []string{"", "", "\x00\r\n", strings.Repeat("x", 64<<10), "\xff", "0"}
		var want []string
		for i, id := range ids {
			f.track(fmt.Sprint(i), abort.Request{ID: id, Priority: -1})
			want = append([]string{fmt.Sprint(i)}, want...)
		}
		f.want("victims", strings.Join(want, " "), f.evict(evictor.Demand{N: 9}))
	})
	t.Run("another priority under the same id", func(t *testing.T) {
		for _, order := range [][2]int{{0, -1}, {-1, 0}} {
			f := newFleet(t)
			for _, p := range order {
				f.track(fmt.Sprint(p), abort.Request{ID: "same", Priority: p})
			}
			f.wantLen("both", 2)
			f.want("victims", "-1", f.evict(evictor.Demand{N: 9}))
			f.wantLen("the other", 1)
		}
	})
}

// TestDeparted: a request whose client has left is no victim, also if its server has not
// looked.
func TestDeparted(t *testing.T) {
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			f := newFleet(t, append(way.opts, evictor.WithAborter(abort.AborterFunc(func(_ context.Context, h *abort.Handle, _ abort.Reason) error {
				if h.Outcome() != abort.Pending {
					t.Error("the Aborter hears of a request that is over")
				}
				return nil
			})))...)
			for i := range 6 {
				f.track(fmt.Sprint(i), at("e", -1))
			}
			f.all["5"].leave()
			f.all["4"].own.Settle(abort.Completed)
			f.all["3"].own.Close()
			f.all["1"].leave()
			d := evictor.Demand{N: 2, DryRun: true}
			way.do(&d)
			f.want("dry run", "2 0", f.evict(d))
			d.DryRun = false
			hs := strings.Fields(f.evict(d))
			slices.Sort(hs) // Aborters are several at a time
			f.want("victims", "0 2", strings.Join(hs, " "))
			for _, n := range []string{"5", "1"} {
				if r := f.all[n]; r.Outcome() != abort.Closed {
					t.Errorf("%s is %v", n, r.Outcome())
				}
			}
			f.want("candidates", "", f.candidates(""))
			f.track("5", at("e", -1))
			f.want("tracked again", "", f.evict(evictor.Demand{N: 9}))
			if n := f.Len(); n > 2 { // those whose servers have not noticed
				t.Errorf("Len = %d", n)
			}
			f.all["5"].own.Close()
			f.all["1"].own.Close()
			f.wantLen("all closed", 0)
		})
	}
}

func TestBefore(t *testing.T) {
	const U, W, H, S = abort.Unknown, abort.Waiting, abort.Held, abort.Streaming
	for _, tc := range []struct {
		before abort.Phase
		want   string
	}{
		{U, "streaming held waiting unknown"},
		{W, ""},
		{H, "waiting"},
		{S, "held waiting"},
		{-1, ""},
	} {
		t.Run(tc.before.String(), func(t *testing.T) {
			var heard []string
			var f *fleet
			for _, opts := range [][]evictor.Option{nil, {evictor.WithAborter(abort.AborterFunc(func(_ context.Context, h *abort.Handle, _ abort.Reason) error {
				heard = append(heard, f.names[h]) // one at a time: N is 1
				return nil
			}))}} {
				f = newFleet(t, opts...)
				for _, p := range []abort.Phase{U, W, H, S} {
					f.track(p.String(), at("e", -1)).own.Advance(p)
				}
				f.want("dry run", tc.want, f.evict(evictor.Demand{N: 9, Before: tc.before, DryRun: true}))
				f.want("victims", tc.want, f.each(evictor.Demand{N: 1, Before: tc.before}))
				f.wantLen("the rest", 4-len(strings.Fields(tc.want)))
			}
			f.want("the Aborter heard of", tc.want, strings.Join(heard, " "))
		})
	}
}

// TestAdvancedSinceChosen: an Aborter must not hear of a request that has come too far
// since it was chosen.
func TestAdvancedSinceChosen(t *testing.T) {
	f := newFleet(t, evictor.WithAborter(abort.AborterFunc(func(_ context.Context, h *abort.Handle, _ abort.Reason) error {
		if h.Progress().Phase != abort.Waiting {
			t.Error("the Aborter hears of it")
		}
		return nil
	})))
	f.track("y", at("e", -1))
	x := f.track("x", at("e", -1))
	f.want("victims", "y", f.evict(evictor.Demand{N: 1, Before: abort.Streaming, Spare: func(h *abort.Handle) bool {
		if f.names[h] == "y" { // x was looked at before
			x.own.Advance(abort.Streaming)
		}
		return false
	}}))
	f.want("candidates", "x", f.candidates("e"))
}

// TestBeforeIsExact: the release of the first byte and an eviction before it never both
// win, also with an Aborter in between.
func TestBeforeIsExact(t *testing.T) {
	for name, opts := range map[string][]evictor.Option{
		"plain": nil,
		"with an Aborter": {evictor.WithAborter(abort.AborterFunc(func(context.Context, *abort.Handle, abort.Reason) error {
			runtime.Gosched()
			return nil
		}))},
	} {
		t.Run(name, func(t *testing.T) {
			for i := range *rounds {
				ev := evictor.New(opts...)
				own, ctx := abort.New(context.Background())
				ev.TrackRequests(ctx, at("e", -1))
				var released bool
				var hs []*abort.Handle
				together(func() {
					if i%2 == 0 {
						own.Advance(abort.Held)
					}
					released = own.Advance(abort.Streaming)
				}, func() {
					hs, _ = ev.Evict(context.Background(), evictor.Demand{N: 1, Before: abort.Streaming})
				})
				if released == (len(hs) == 1) || released == (own.Handle().Outcome() == abort.Aborted) {
					t.Fatalf("released %v, evicted %d, outcome %v", released, len(hs), own.Handle().Outcome())
				}
				if released && ev.Len() != 1 {
					t.Fatal("spared, and not tracked any more")
				}
				own.Close()
			}
		})
	}
}

func TestDryRun(t *testing.T) {
	f := newFleet(t, evictor.WithAborter(abort.AborterFunc(func(context.Context, *abort.Handle, abort.Reason) error {
		t.Error("the Aborter was called")
		return nil
	})))
	for i := range 5 {
		f.track(fmt.Sprint(i), at("e", -1))
	}
	for _, d := range []evictor.Demand{{N: 2}, {N: 99}, {Tokens: 3}, {N: 2, Endpoint: "e"}, {N: 2, Before: abort.Held}} {
		d.DryRun = true
		want := f.evict(d)
		f.want("again", want, f.evict(d))
		f.wantLen("dry run", 5)
		for _, r := range f.all {
			if r.Outcome() != abort.Pending || r.ctx.Err() != nil {
				t.Errorf("%+v: %s is %v", d, r.name, r.Outcome())
			}
		}
	}
}

// TestEndedDemand: a context that is done evicts nobody, whatever way they are chosen.
func TestEndedDemand(t *testing.T) {
	gone := errors.New("the urgent request is gone")
	for _, way := range ways {
		for _, dry := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/dry %v", way.name, dry), func(t *testing.T) {
				f := newFleet(t, way.opts...)
				x := f.track("x", at("e", -1))
				ctx, cancel := context.WithCancelCause(context.Background())
				cancel(gone)
				d := evictor.Demand{N: 1, DryRun: dry}
				way.do(&d)
				hs, err := f.Evict(ctx, d)
				if len(hs) != 0 || !errors.Is(err, gone) || !strings.HasPrefix(err.Error(), "evictor: ") {
					t.Errorf("victims %q, error %v", f.name(hs), err)
				}
				if x.Outcome() != abort.Pending {
					t.Errorf("x is %v", x.Outcome())
				}
				f.want("candidates", "x", f.candidates(""))
			})
		}
	}
}

// TestDemandEndsMidway: at most what was already issued.
func TestDemandEndsMidway(t *testing.T) {
	for _, way := range ways {
		t.Run(way.name, func(t *testing.T) {
			f := newFleet(t, way.opts...)
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			const n = 600 // several batches
			var ended atomic.Int32
			for i := range n {
				f.track(fmt.Sprint(i), at("e", -1)).OnSettle(func(abort.Outcome) {
					if ended.Add(1) == 300 {
						cancel()
					}
				})
			}
			d := evictor.Demand{N: n}
			way.do(&d)
			hs, err := f.Evict(ctx, d)
			aborted := 0
			for _, r := range f.all {
				if r.Outcome() == abort.Aborted {
					aborted++
				}
			}
			// With Aborters, those that are at work when the demand ends decide alone.
			if slack := aborted - 300; slack < 0 || slack > 16 || way.name != "with an Aborter" && slack > 0 {
				t.Errorf("%d evicted, %d of them after the demand's end", aborted, slack)
			}
			if len(hs) > aborted || way.name != "with an Aborter" && len(hs) != aborted || !errors.Is(err, context.Canceled) {
				t.Errorf("%d returned of %d, error %v", len(hs), aborted, err)
			}
			if way.name != "with an Aborter" {
				f.evict(evictor.Demand{N: n}) // all others are candidates again
				f.wantLen("all evicted", 0)
			}
		})
	}
}

// model is a naive evictor.
type model struct {
	live []*tracked // in the order of dispatch
}

type tracked struct {
	*request
	reqs []abort.Request
	left bool
	bad  bool // its Aborter fails
}

// eligible returns those whom d allows, in the default order.
func (m *model) eligible(d evictor.Demand) []*tracked {
	var ts []*tracked
	for _, t := range slices.Backward(m.live) {
		if !t.left && len(t.reqs) > 0 && t.reqs[0].Priority < d.Below && (d.Endpoint == "" || slices.ContainsFunc(t.reqs, func(r abort.Request) bool { return r.Endpoint == d.Endpoint })) {
			ts = append(ts, t)
		}
	}
	slices.SortStableFunc(ts, func(a, b *tracked) int { return cmp.Compare(a.reqs[0].Priority, b.reqs[0].Priority) })
	return ts
}

func (m *model) remove(t *tracked) {
	m.live = slices.DeleteFunc(m.live, func(o *tracked) bool { return o == t })
}

// TestAgainstModel: random requests come, move, go and are evicted; a naive model agrees
// with every answer.
func TestAgainstModel(t *testing.T) {
	for round := range max(5, *rounds/20) {
		seed := rand.Uint64()
		rnd := rand.New(rand.NewPCG(seed, 0))
		func() {
			m := &model{}
			bad := map[*abort.Handle]bool{}
			var opts []evictor.Option
			if round%2 == 0 {
				opts = append(opts, evictor.WithAborter(abort.AborterFunc(func(_ context.Context, h *abort.Handle, _ abort.Reason) error {
					if bad[h] {
						return errors.New("no")
					}
					return nil
				})))
			}
			f := newFleet(t, opts...)
			randReqs := func() (reqs []abort.Request) {
				for range []int{1, 1, 1, 2, 3, 0}[rnd.IntN(6)] {
					reqs = append(reqs, at([]string{"", "a", "b", "c"}[rnd.IntN(4)], rnd.IntN(5)-3))
				}
				return reqs
			}
			pick := func() *tracked {
				if len(m.live) == 0 {
					return nil
				}
				return m.live[rnd.IntN(len(m.live))]
			}
			for step := range 80 {
				switch op := rnd.IntN(10); op {
				case 0, 1, 2, 3: // a new one
					tr := &tracked{request: f.begin(fmt.Sprint(step)), reqs: randReqs(), bad: round%2 == 0 && rnd.IntN(4) == 0}
					bad[tr.Handle] = tr.bad
					f.TrackRequests(tr.ctx, tr.reqs...)
					m.live = append(m.live, tr)
				case 4: // again
					if tr := pick(); tr != nil {
						m.remove(tr)
						tr.reqs = randReqs()
						f.TrackRequests(tr.ctx, tr.reqs...)
						m.live = append(m.live, tr)
					}
				case 5:
					if tr := pick(); tr != nil {
						tr.own.Settle(abort.Completed)
						m.remove(tr)
					}
				case 6:
					if tr := pick(); tr != nil {
						tr.leave()
						tr.left = true
					}
				default:
					d := evictor.Demand{N: rnd.IntN(4), Below: rnd.IntN(6) - 3, Endpoint: []string{"", "a", "b", "c", "z"}[rnd.IntN(5)]}
					if op == 9 {
						d.Spare = func(*abort.Handle) bool { return false } // the other way to choose
					}
					if d.N == 0 {
						continue
					}
					eligible := m.eligible(d)
					var dry []string
					for _, tr := range eligible[:min(d.N, len(eligible))] {
						dry = append(dry, tr.name)
					}
					d.DryRun = true
					if got := f.evict(d); got != strings.Join(dry, " ") {
						t.Fatalf("seed %d, step %d: dry run of %+v: %q, want %q", seed, step, d, got, dry)
					}
					d.DryRun = false
					var want []string
					tried := 0
					for _, tr := range eligible {
						if len(want) == d.N {
							break
						}
						tried++
						if !tr.bad {
							want = append(want, tr.name)
							m.remove(tr)
						}
					}
					hs, err := f.Evict(context.Background(), d)
					got := strings.Fields(f.name(hs))
					if len(opts) > 0 { // several Aborters at a time
						slices.Sort(got)
						slices.Sort(want)
					}
					if !slices.Equal(got, want) || (err != nil) != (tried > len(want)) {
						t.Fatalf("seed %d, step %d: %+v: %q, %v, want %q", seed, step, d, got, err, want)
					}
				}
			}
			for _, e := range []string{"", "a", "b", "c"} {
				var want []string
				for _, tr := range m.eligible(evictor.Demand{Below: math.MaxInt, Endpoint: e}) {
					want = append(want, tr.name)
				}
				if got := f.candidates(e); got != strings.Join(want, " ") {
					t.Fatalf("seed %d: at the end, at %q: %q, want %q", seed, e, got, want)
				}
			}
			for _, r := range f.all {
				r.own.Close()
				r.leave()
			}
			f.wantLen("all closed", 0)
		}()
	}
}
