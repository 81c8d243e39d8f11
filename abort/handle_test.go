package abort_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/abort"
)

type settler func(abort.Outcome)

func (f settler) Settled(oc abort.Outcome) { f(oc) }

// closed reports whether the channel is closed.
func closed(ch <-chan struct{}) bool {
	select {
	case <-ch:
		return true
	default:
		return false
	}
}

func TestLife(t *testing.T) {

	for _, tc := range []struct {
		name  string
		do    func(o *abort.Owner, leave func()) bool
		won   bool
		want  abort.Outcome
		ended bool // the context is done
	}{
		{"abort", func(o *abort.Owner, _ func()) bool { return o.Handle().Abort("x") }, true, abort.Aborted, true},
		{"abort before streaming", func(o *abort.Owner, _ func()) bool { return o.Handle().AbortBefore(abort.Streaming, "x") }, true, abort.Aborted, true},
		{"abort before waiting", func(o *abort.Owner, _ func()) bool { return o.Handle().AbortBefore(abort.Waiting, "x") }, false, abort.Pending, false},
		{"complete", func(o *abort.Owner, _ func()) bool { return o.Settle(abort.Completed) }, true, abort.Completed, false},
		{"settle closed", func(o *abort.Owner, _ func()) bool { return o.Settle(abort.Closed) }, true, abort.Closed, false},
		{"close", func(o *abort.Owner, _ func()) bool { o.Close(); return true }, true, abort.Closed, true},
		{"abort twice", func(o *abort.Owner, _ func()) bool { o.Handle().Abort("x"); return o.Handle().Abort("y") }, false, abort.Aborted, true},
		{"complete twice", func(o *abort.Owner, _ func()) bool {
			o.Settle(abort.Completed)
			return o.Settle(abort.Completed)
		}, false, abort.Completed, false},
		{"complete, abort", func(o *abort.Owner, _ func()) bool {
			o.Settle(abort.Completed)
			return o.Handle().Abort("x")
		}, false, abort.Completed, false},
		{"abort, complete", func(o *abort.Owner, _ func()) bool {
			o.Handle().Abort("x")
			return o.Settle(abort.Completed)
		}, false, abort.Aborted, true},
		{"close, abort", func(o *abort.Owner, _ func()) bool { o.Close(); return o.Handle().Abort("x") }, false, abort.Closed, true},
		{"close, complete", func(o *abort.Owner, _ func()) bool { o.Close(); return o.Settle(abort.Completed) }, false, abort.Closed, true},
		{"complete, close", func(o *abort.Owner, _ func()) bool { o.Settle(abort.Completed); o.Close(); return true }, true, abort.Completed, true},
		{"abort, close, close", func(o *abort.Owner, _ func()) bool {
			won := o.Handle().Abort("x")
			o.Close()
			o.Close()
			return won
		}, true, abort.Aborted, true},
		{"the client leaves", func(_ *abort.Owner, leave func()) bool { leave(); return true }, true, abort.Closed, true},
		{"the client leaves, abort", func(o *abort.Owner, leave func()) bool { leave(); return o.Handle().Abort("x") }, false, abort.Closed, true},
		{"the client leaves, abort before streaming", func(o *abort.Owner, leave func()) bool {
			leave()
			return o.Handle().AbortBefore(abort.Streaming, "x")
		}, false, abort.Closed, true},
		{"the client leaves, complete", func(o *abort.Owner, leave func()) bool { leave(); return o.Settle(abort.Completed) }, false, abort.Closed, true},
		{"the client leaves, settle closed", func(o *abort.Owner, leave func()) bool { leave(); return o.Settle(abort.Closed) }, true, abort.Closed, true},
		{"complete, the client leaves", func(o *abort.Owner, leave func()) bool {
			won := o.Settle(abort.Completed)
			leave()
			return won
		}, true, abort.Completed, true},
		{"abort, the client leaves", func(o *abort.Owner, leave func()) bool {
			won := o.Handle().Abort("x")
			leave()
			return won
		}, true, abort.Aborted, true},
	} {
		for _, watched := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s/watched %v", tc.name, watched), func(t *testing.T) {
				parent, leave := context.WithCancel(context.Background())
				defer leave()
				own, ctx := abort.New(parent)
				defer own.Close()
				h := own.Handle()
				if watched {
					_ = ctx.Done()
				}
				if abort.FromContext(ctx) != h || h.Outcome() != abort.Pending || h.Err() != nil || ctx.Err() != nil {
					t.Fatal("not pending at the start")
				}
				if won := tc.do(own, leave); won != tc.won {
					t.Errorf("won = %v, want %v", won, tc.won)
				}
				if oc := h.Outcome(); oc != tc.want {
					t.Errorf("outcome = %v, want %v", oc, tc.want)
				}
				if (ctx.Err() != nil) != tc.ended || closed(ctx.Done()) != tc.ended {
					t.Errorf("context: %v, want an end: %v", ctx.Err(), tc.ended)
				}
				err := h.Err()
				if (err != nil) != (tc.want == abort.Aborted) || err != nil && (err != context.Cause(ctx) || err.(*abort.Error).Reason != "x") {
					t.Errorf("Err = %v, cause %v", err, context.Cause(ctx))
				}
			})
		}
	}
}

// Invariant 1: one outcome for each handle.
func TestOneOutcome(t *testing.T) {
	for range max(10, *rounds/100) {
		own, ctx := abort.New(context.Background())
		h := own.Handle()
		var won [abort.Closed + 1]atomic.Int32
		var hooks atomic.Int32
		var told abort.Outcome
		h.OnSettle(func(oc abort.Outcome) { hooks.Add(1); told = oc })
		count := func(ok bool, oc abort.Outcome) {
			if ok {
				won[oc].Add(1)
			}
		}
		var fs []func()
		for i := range 100 {
			fs = append(fs, []func(){
				func() { count(h.Abort(abort.Preempted), abort.Aborted) },
				func() { count(h.AbortBefore(abort.Held, abort.Preempted), abort.Aborted) },
				func() { count(own.Settle(abort.Completed), abort.Completed) },
				func() { count(own.Settle(abort.Closed), abort.Closed) },
				func() { own.Close() },
			}[i%5])
		}
		together(fs...)
		oc := h.Outcome()
		for _, f := range fs { // after the end nobody wins
			f()
		}
		if h.Outcome() != oc || oc == abort.Pending {
			t.Errorf("%v, then %v", oc, h.Outcome())
		}
		sum := won[abort.Completed].Load() + won[abort.Aborted].Load() + won[abort.Closed].Load()
		if sum > 1 || sum == 0 && oc != abort.Closed || sum == 1 && won[oc].Load() != 1 {
			t.Errorf("outcome %v, winners: completed %d, aborted %d, closed %d", oc,
				won[abort.Completed].Load(), won[abort.Aborted].Load(), won[abort.Closed].Load())
		}
		if hooks.Load() != 1 || told != oc {
			t.Errorf("outcome %v, hook told %v, %d times", oc, told, hooks.Load())
		}
		if (causeOf(ctx) != nil) != (oc == abort.Aborted) || !closed(h.Done()) {
			t.Errorf("outcome %v, cause %v", oc, context.Cause(ctx))
		}
	}
}

// TestAbortIsOneStep: whoever has seen any part of an abort sees the rest.
func TestAbortIsOneStep(t *testing.T) {
	for i := range *rounds {
		own, ctx := abort.New(context.Background())
		h := own.Handle()
		if i%2 == 0 {
			_ = ctx.Done()
		}
		var reg abort.Registry
		reg.Add("id", h)
		var hook atomic.Bool
		h.OnSettle(func(abort.Outcome) { hook.Store(true) })
		whole := func(who string) {
			if ctx.Err() == nil || !closed(ctx.Done()) || h.Err() == nil || causeOf(ctx) != h.Err() || h.Outcome() != abort.Aborted || own.Advance(abort.Held) {
				t.Errorf("%s: context %v, cause %v, Err %v, outcome %v", who, ctx.Err(), context.Cause(ctx), h.Err(), h.Outcome())
			}
		}
		aborter := func() {
			won := h.Abort(abort.Preempted)
			if won && (!hook.Load() || reg.Len() != 0 || reg.Lookup("id") != nil) {
				t.Errorf("the winner is back before the hooks: hook %v, registered %d", hook.Load(), reg.Len())
			}
			whole("aborter")
		}
		watcher := func() {
			for h.Err() == nil {
				runtime.Gosched()
			}
			whole("watcher of Err")
		}
		together(aborter, aborter, watcher, func() {
			for h.Outcome() == abort.Pending {
				runtime.Gosched()
			}
			whole("watcher of Outcome")
		}, func() {
			<-ctx.Done()
			whole("watcher of the context")
		}, func() {
			for ctx.Err() == nil {
				runtime.Gosched()
			}
			if h.Err() == nil {
				t.Error("context is done, Err is nil")
			}
			whole("watcher of the context's error")
		})
		own.Close()
	}
}

// TestClientLeavesFirst: in the window in which the parent is canceled and its
// children are not yet, the client has left and an abort loses.
func TestClientLeavesFirst(t *testing.T) {
	const others = 100 // contexts that the parent's cancel is busy with meanwhile
	for range max(10, *rounds/20) {
		parent, leave := context.WithCancelCause(context.Background())
		gone := errors.New("gone")
		own, ctx := abort.New(parent)
		_ = ctx.Done()
		for range others {
			_, cancel := context.WithCancel(parent)
			defer cancel()
		}
		h := own.Handle()
		together(func() { leave(gone) }, func() {
			for parent.Err() == nil {
				runtime.Gosched()
			}
			if h.Outcome() != abort.Closed || h.Abort(abort.Preempted) || h.AbortBefore(abort.Held, abort.Preempted) || h.Outcome() != abort.Closed {
				t.Error("an abort won after the client had left")
			}
		})
		if context.Cause(ctx) != gone || h.Err() != nil {
			t.Errorf("cause %v, Err %v", context.Cause(ctx), h.Err())
		}
		own.Close()
	}
}

// TestOutcomeIsForGood: client, aborters, owner and watchers at once; an outcome that
// somebody was told never changes, and the context agrees with it.
func TestOutcomeIsForGood(t *testing.T) {
	for i := range *rounds {
		parent, leave := context.WithCancel(context.Background())
		own, ctx := abort.New(parent)
		if i%2 == 0 {
			_ = ctx.Done()
		}
		h := own.Handle()
		var mu sync.Mutex
		var told []abort.Outcome
		tell := func(oc abort.Outcome) {
			mu.Lock()
			defer mu.Unlock()
			told = append(told, oc)
		}
		h.OnSettle(tell)
		watch := func() {
			for range 20 {
				if oc := h.Outcome(); oc != abort.Pending {
					tell(oc)
				}
			}
		}
		fs := []func(){leave, watch, func() {
			if h.Abort(abort.Preempted) {
				tell(abort.Aborted)
			} else if oc := h.Outcome(); oc == abort.Pending {
				t.Error("an abort lost to nobody")
			}
		}}
		if i%3 == 0 {
			fs = append(fs, func() {
				if own.Settle(abort.Completed) {
					tell(abort.Completed)
				}
			})
		}
		together(fs...)
		own.Close()
		tell(h.Outcome())
		for _, oc := range told {
			if oc != told[0] {
				t.Fatalf("outcomes told: %v", told)
			}
		}
		if aborted := h.Outcome() == abort.Aborted; aborted != (causeOf(ctx) != nil) || aborted != (h.Err() != nil) {
			t.Errorf("outcome %v, cause %v, Err %v", h.Outcome(), context.Cause(ctx), h.Err())
		}
	}
}

// TestNobody: nil and zero handles and zero owners are requests that are never aborted.
func TestNobody(t *testing.T) {
	var zero abort.Handle
	var own abort.Owner
	for _, tc := range []struct {
		name string
		h    *abort.Handle
	}{
		{"nil handle", nil},
		{"zero handle", &zero},
		{"handle of a zero owner", own.Handle()},
		{"no handle in the context", abort.FromContext(context.Background())},
	} {
		t.Run(tc.name, func(t *testing.T) {
			h := tc.h
			if h.Abort(abort.Preempted) || h.AbortBefore(abort.Streaming, abort.Preempted) {
				t.Error("aborted")
			}
			h.Describe(abort.Request{ID: "x"})
			h.OnSettle(func(abort.Outcome) { t.Error("settled") })
			if s := h.Attach("key", settler(func(abort.Outcome) { t.Error("settled") })); s != nil {
				t.Errorf("Attach = %v", s)
			}
			if h.Outcome() != abort.Pending || h.Err() != nil || h.Requests() != nil || h.Progress() != (abort.Progress{}) || closed(h.Done()) {
				t.Error("not nobody")
			}
			var reg abort.Registry
			reg.Add("id", h)
			if reg.Len() != 0 || reg.Abort("id", abort.Canceled) != 0 {
				t.Error("registered")
			}
		})
	}
	own.Advance(abort.Streaming)
	own.Count(1, 1)
	if own.Settle(abort.Completed) || own.Settle(abort.Closed) {
		t.Error("a zero Owner settled")
	}
	own.Close()
	own.Close()
	if own.Handle().Outcome() != abort.Pending {
		t.Error("a zero Owner settled")
	}
}

func TestMisuse(t *testing.T) {
	own, _ := abort.New(context.Background())
	defer own.Close()
	var none context.Context
	for _, tc := range []struct {
		name string
		f    func()
		want any
	}{
		{"New without a parent", func() { abort.New(none) }, "abort: New: nil parent"},
		{"OnSettle(nil)", func() { own.Handle().OnSettle(nil) }, "abort: OnSettle: nil function"},
		{"Attach(nil)", func() { own.Handle().Attach("key", nil) }, "abort: Attach: nil Settler"},
		{"Settle(Pending)", func() { own.Settle(abort.Pending) }, "abort: Settle: outcome pending"},
		{"Settle(Aborted)", func() { own.Settle(abort.Aborted) }, "abort: Settle: outcome aborted"},
		{"Settle(Closed+1)", func() { own.Settle(abort.Closed + 1) }, "abort: Settle: outcome invalid"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, panics(tc.f)); diff != "" {
				t.Errorf("panic (-want +got)\n%s", diff)
			}
			if own.Handle().Outcome() != abort.Pending {
				t.Error("settled")
			}
		})
	}
}

func TestAbortBefore(t *testing.T) {
	const U, W, H, S = abort.Unknown, abort.Waiting, abort.Held, abort.Streaming
	for _, tc := range []struct {
		phase, before abort.Phase
		want          bool
	}{
		{U, U, true}, {U, W, false}, {U, H, false}, {U, S, false}, {U, S + 1, false}, {U, -1, false},
		{W, U, true}, {W, W, false}, {W, H, true}, {W, S, true}, {W, S + 1, true}, {W, -1, false},
		{H, U, true}, {H, W, false}, {H, H, false}, {H, S, true}, {H, S + 1, true}, {H, -1, false},
		{S, U, true}, {S, W, false}, {S, H, false}, {S, S, false}, {S, S + 1, true}, {S, -1, false},
	} {
		t.Run(fmt.Sprintf("%v before %v", tc.phase, tc.before), func(t *testing.T) {
			own, _ := abort.New(context.Background())
			defer own.Close()
			own.Advance(tc.phase)
			if got := own.Handle().Progress().Phase; got != tc.phase {
				t.Fatalf("phase = %v, want %v", got, tc.phase)
			}
			if got := own.Handle().AbortBefore(tc.before, abort.Preempted); got != tc.want {
				t.Errorf("AbortBefore = %v, want %v", got, tc.want)
			}
			want := abort.Pending
			if tc.want {
				want = abort.Aborted
			}
			if oc := own.Handle().Outcome(); oc != want {
				t.Errorf("outcome = %v, want %v", oc, want)
			}
			if ok := own.Advance(S); ok == tc.want {
				t.Errorf("Advance = %v after it", ok)
			}
		})
	}
}

// Invariant 4: AbortBefore(p) and the release that Advance(p) allows never both win.
func TestAbortBeforeIsExact(t *testing.T) {
	var early, late int
	for i := range 4 * *rounds { // the window is small

		own, _ := abort.New(context.Background())
		h := own.Handle()
		p := []abort.Phase{abort.Held, abort.Streaming}[i%2]
		var aborted, released bool
		together(func() {
			if i%3 == 0 {
				own.Advance(abort.Unknown)
			}
			if i%4 == 0 {
				own.Advance(abort.Held)
			}
			released = own.Advance(p)
		}, func() {
			aborted = h.AbortBefore(p, abort.Preempted)
		})
		if aborted == released {
			t.Fatalf("%v: aborted %v, released %v", p, aborted, released)
		}
		if aborted {
			early++
		} else {
			late++
		}
		own.Close()
	}
	if *rounds >= 1000 && (early == 0 || late == 0) {
		t.Errorf("no race: %d early, %d late", early, late)
	}
}

func TestPhasesNeverGoBack(t *testing.T) {
	const U, W, H, S = abort.Unknown, abort.Waiting, abort.Held, abort.Streaming
	for _, tc := range []struct{ from, to, want abort.Phase }{
		{W, U, U}, {W, W, W}, {W, H, H}, {W, S, S}, {W, -1, W},
		{U, U, U}, {U, W, U}, {U, H, H}, {U, S, S}, {U, -1, U},
		{H, U, H}, {H, W, H}, {H, H, H}, {H, S, S}, {H, -1, H},
		{S, U, S}, {S, W, S}, {S, H, S}, {S, S, S}, {S, -1, S},
	} {
		t.Run(fmt.Sprintf("%v to %v", tc.from, tc.to), func(t *testing.T) {
			own, _ := abort.New(context.Background())
			defer own.Close()
			if !own.Advance(tc.from) || !own.Advance(tc.to) {
				t.Error("Advance = false without an abort")
			}
			if got := own.Handle().Progress().Phase; got != tc.want {
				t.Errorf("phase = %v, want %v", got, tc.want)
			}
		})
	}

	order := []abort.Phase{W, U, H, S}
	for range *rounds / 4 {
		own, _ := abort.New(context.Background())
		advance := func() {
			for range 4 {
				own.Advance(order[rand.IntN(len(order))])
			}
		}
		together(advance, advance, func() {
			last := 0
			for range 20 {
				now := slices.Index(order, own.Handle().Progress().Phase)
				if now < last {
					t.Errorf("from %v to %v", order[last], order[now])
				}
				last = now
			}
		})
		own.Close()
	}
}

// TestAdvanceAfterTheEnd: only an abort forbids a release; a server whose client left, or
// whose request is complete, may go on.
func TestAdvanceAfterTheEnd(t *testing.T) {
	for _, tc := range []struct {
		name string
		end  func(*abort.Owner)
		want bool
	}{
		{"aborted", func(o *abort.Owner) { o.Handle().Abort("") }, false},
		{"completed", func(o *abort.Owner) { o.Settle(abort.Completed) }, true},
		{"closed", func(o *abort.Owner) { o.Close() }, true},
	} {
		own, _ := abort.New(context.Background())
		tc.end(own)
		for _, p := range []abort.Phase{abort.Unknown, abort.Held, abort.Streaming} {
			if got := own.Advance(p); got != tc.want {
				t.Errorf("%s: Advance(%v) = %v", tc.name, p, got)
			}
		}
		own.Close()
	}
}

func TestProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		own, _ := abort.New(context.Background())
		defer own.Close()
		h := own.Handle()
		want := abort.Progress{Phase: abort.Waiting, Start: start}
		check := func(what string) {
			t.Helper()
			if diff := cmp.Diff(want, h.Progress()); diff != "" {
				t.Errorf("%s (-want +got)\n%s", what, diff)
			}
		}
		check("new")
		time.Sleep(time.Second)
		own.Count(0, 0)
		check("nothing counted")
		own.Unseen()
		want.Unseen = true
		check("unseen")
		want.Unseen = false // it is seen after all
		own.Advance(abort.Held)
		want.Phase = abort.Held
		own.Count(1, 10)
		want.FirstChunk, want.Chunks, want.Bytes = start.Add(time.Second), 1, 10
		check("first chunk")
		time.Sleep(time.Second)
		own.Advance(abort.Streaming)
		want.Phase = abort.Streaming
		own.Count(2, 5)
		want.Chunks, want.Bytes = 3, 15
		check("more chunks")
		h.Abort(abort.Preempted)
		own.Count(1, math.MaxInt32)
		want.Chunks, want.Bytes = 4, 15+math.MaxInt32
		check("after the end")
	})
	own, _ := abort.New(context.Background())
	defer own.Close()
	count := func() {
		for range 1000 {
			own.Count(1, 2)
			own.Handle().Progress()
		}
	}
	together(count, count)
	if p := own.Handle().Progress(); p.Chunks != 2000 || p.Bytes != 4000 {
		t.Errorf("%d chunks, %d bytes", p.Chunks, p.Bytes)
	}
}

func TestDescribe(t *testing.T) {
	own, _ := abort.New(context.Background())
	defer own.Close()
	h := own.Handle()
	if got := h.Requests(); got != nil {
		t.Errorf("Requests = %v at first", got)
	}
	a, b := abort.Request{ID: "a", Key: "k", Priority: -1, Tokens: 7, Endpoint: "e", Evictions: 2}, abort.Request{ID: "b"}
	var seen [][]abort.Request // none of them may change later
	var want [][]abort.Request
	for i, reqs := range [][]abort.Request{{a}, {}, {b}, {a}, {a, b}, nil, {b}, {b, a}, {b}} {
		h.Describe(reqs...)
		clear(reqs[:copy(reqs, slices.Clone(reqs))]) // the caller's own
		got := h.Requests()
		switch i {
		case 1, 5:
			if len(got) != 0 {
				t.Errorf("Requests = %v, want none", got)
			}
		}
		seen, want = append(seen, got), append(want, slices.Clone(got))
		_ = append(got, abort.Request{ID: "theirs"})
	}
	if diff := cmp.Diff(want, seen); diff != "" {
		t.Errorf("changed in place (-want +got)\n%s", diff)
	}
	if diff := cmp.Diff([]abort.Request{a, b}, seen[4]); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
	h.Abort(abort.Preempted)
	h.Describe(a)
	if diff := cmp.Diff([]abort.Request{a}, h.Requests()); diff != "" {
		t.Errorf("after the end (-want +got)\n%s", diff)
	}
}

// TestDescribeWhileReading: what Requests returned is not written again (-race).
func TestDescribeWhileReading(t *testing.T) {
	own, _ := abort.New(context.Background())
	defer own.Close()
	h := own.Handle()
	var stop atomic.Bool
	together(func() {
		for i := range 1000 {
			h.Describe(abort.Request{Priority: i})
			h.Describe()
			h.Describe(abort.Request{Priority: i}, abort.Request{Priority: i})
		}
		stop.Store(true)
	}, func() {
		for !stop.Load() {
			if reqs := h.Requests(); len(reqs) == 2 && reqs[0] != reqs[1] {
				t.Error("torn")
			}
			runtime.Gosched()
		}
	})
}

func TestDone(t *testing.T) {
	own, _ := abort.New(context.Background())
	h := own.Handle()
	early := h.Done()
	h.Abort(abort.Preempted)
	if closed(early) {
		t.Error("closed by the abort")
	}
	own.Close()
	if !closed(early) || !closed(h.Done()) {
		t.Error("not closed by Close")
	}

	own, _ = abort.New(context.Background())
	own.Close()
	if !closed(own.Handle().Done()) {
		t.Error("first asked for after Close: not closed")
	}

	own, ctx := abort.New(context.Background())
	own.Handle().OnSettle(func(abort.Outcome) { panic("hook") })
	if p := panics(own.Close); p != "hook" {
		t.Errorf("Close panics with %v", p)
	}
	if !closed(own.Handle().Done()) || ctx.Err() == nil {
		t.Error("a hook's panic kept Close from its work")
	}
}

func TestHooks(t *testing.T) {
	for _, n := range []int{0, 1, 2, 3, 10} {
		t.Run(fmt.Sprint(n), func(t *testing.T) {
			own, _ := abort.New(context.Background())
			defer own.Close()
			h := own.Handle()
			var got []int
			var want []int
			for i := range n {
				want = append(want, i)
				h.OnSettle(func(oc abort.Outcome) {
					if oc != abort.Completed {
						t.Errorf("told %v", oc)
					}
					got = append(got, i)
				})
			}
			if own.Settle(abort.Completed); !slices.Equal(got, want) {
				t.Errorf("calls %v, want %v", got, want)
			}
			called := false
			h.OnSettle(func(oc abort.Outcome) { called = oc == abort.Completed })
			if !called {
				t.Error("not called at once though settled")
			}
		})
	}
}

func TestHookOfDeparted(t *testing.T) {
	parent, leave := context.WithCancel(context.Background())
	own, _ := abort.New(parent)
	leave()
	var got []abort.Outcome
	own.Handle().OnSettle(func(oc abort.Outcome) { got = append(got, oc) })
	if len(got) != 0 {
		t.Errorf("called before anybody settled: %v", got)
	}
	if own.Handle().Abort(abort.Preempted) || len(got) != 1 || got[0] != abort.Closed {
		t.Errorf("the abort that lost did not settle: %v", got)
	}
	own.Close()
	if len(got) != 1 {
		t.Errorf("called again: %v", got)
	}
}

// Invariant 7, hooks that panic: every other hook is called, and the panic goes on.
func TestHookPanics(t *testing.T) {
	for _, tc := range []struct {
		name   string
		panics []int
	}{
		{"the first", []int{0}},
		{"the last", []int{4}},
		{"two in a row", []int{1, 2}},
		{"two apart", []int{0, 3}},
		{"all", []int{0, 1, 2, 3, 4}},
	} {
		for _, how := range []string{"panic", "Goexit"} {
			t.Run(tc.name+"/"+how, func(t *testing.T) {
				own, ctx := abort.New(context.Background())
				h := own.Handle()
				var got []int
				for i := range 5 {
					h.OnSettle(func(abort.Outcome) {
						got = append(got, i)
						if slices.Contains(tc.panics, i) {
							if how == "panic" {
								panic(i)
							}
							runtime.Goexit()
						}
					})
				}
				var p any
				returned := false
				within(t, func() {
					p = panics(func() { h.Abort(abort.Preempted); returned = true })
				})
				if returned || how == "panic" && p != tc.panics[len(tc.panics)-1] {
					t.Errorf("panic %v, returned %v", p, returned)
				}
				if diff := cmp.Diff([]int{0, 1, 2, 3, 4}, got); diff != "" {
					t.Errorf("hooks called (-want +got)\n%s", diff)
				}
				if h.Outcome() != abort.Aborted || causeOf(ctx) == nil {
					t.Error("not aborted")
				}
				within(t, own.Close) // no lock is left behind
			})
		}
	}
}

// everything calls every method.
func everything(own *abort.Owner, ctx context.Context, reg *abort.Registry) {
	h := own.Handle()
	h.Abort(abort.Canceled)
	h.AbortBefore(abort.Streaming, abort.Canceled)
	h.Describe(abort.Request{ID: "x"})
	h.Requests()
	h.Outcome()
	_ = h.Err()
	h.Done()
	h.Progress()
	h.OnSettle(func(abort.Outcome) {})
	h.Attach("everything", settler(func(abort.Outcome) {}))
	own.Advance(abort.Held)
	own.Count(1, 1)
	own.Settle(abort.Completed)
	own.Close()
	_ = ctx.Err()
	_ = context.Cause(ctx)
	_, cancel := context.WithCancel(ctx)
	cancel()
	reg.Add("other", h)
	reg.Lookup("id")
	for range reg.All() {
		reg.Len()
	}
	reg.Abort("id", abort.Canceled)
}

// Invariant 7, hooks that call back: no hook runs under a lock.
func TestHookCallsBack(t *testing.T) {
	for name, end := range map[string]func(*abort.Owner){
		"abort":    func(o *abort.Owner) { o.Handle().Abort(abort.Preempted) },
		"complete": func(o *abort.Owner) { o.Settle(abort.Completed) },
		"close":    func(o *abort.Owner) { o.Close() },
		"settled":  nil,
	} {
		t.Run(name, func(t *testing.T) {
			own, ctx := abort.New(context.Background())
			defer own.Close()
			var reg abort.Registry
			reg.Add("id", own.Handle())
			calls := 0
			within(t, func() {
				if end == nil {
					own.Close()
				}
				own.Handle().OnSettle(func(abort.Outcome) { calls++; everything(own, ctx, &reg) })
				if end != nil {
					end(own)
				}
			})
			if calls != 1 || reg.Len() != 0 {
				t.Errorf("%d calls, %d registered", calls, reg.Len())
			}
		})
	}
}

// Invariant 7, hooks that sleep: others use the handle meanwhile, and neither they nor
// later hooks' requests wait.
func TestHookSleeps(t *testing.T) {
	own, ctx := abort.New(context.Background())
	var reg abort.Registry
	reg.Add("id", own.Handle())
	sleeping, wake := make(chan struct{}), make(chan struct{})
	own.Handle().OnSettle(func(abort.Outcome) { close(sleeping); <-wake })
	won := make(chan bool)
	go func() { won <- own.Handle().Abort(abort.Preempted) }()
	<-sleeping
	within(t, func() { everything(own, ctx, &reg) })
	other, _ := abort.New(context.Background())
	reg.Add("id", other.Handle())
	if reg.Abort("id", abort.Canceled) != 1 {
		t.Error("another request suffers")
	}
	close(wake)
	if !<-won {
		t.Error("the sleeper's abort did not win")
	}
	other.Close()
}

func TestAttach(t *testing.T) {
	type named struct{ settler }
	own, _ := abort.New(context.Background())
	defer own.Close()
	h := own.Handle()
	var told []string
	mk := func(name string) *named {
		return &named{func(oc abort.Outcome) { told = append(told, name+" "+oc.String()) }}
	}
	a, b, anon1, anon2 := mk("a"), mk("b"), mk("anonymous 1"), mk("anonymous 2")
	for _, tc := range []struct {
		name string
		key  any
		s    *named
		want abort.Settler
	}{
		{"first", "a", a, nil},
		{"same key", "a", mk("never"), a},
		{"other key", "b", b, nil},
		{"other type of key", struct{ string }{"a"}, mk("c"), nil},
		{"no key", nil, anon1, nil},
		{"no key again", nil, anon2, nil},
		{"spilled, first again", "a", mk("never"), a},
		{"spilled, other again", "b", mk("never"), b},
	} {
		if got := h.Attach(tc.key, tc.s); got != tc.want {
			t.Errorf("%s: Attach = %v, want %v", tc.name, got, tc.want)
		}
	}
	h.Abort(abort.Preempted)
	if diff := cmp.Diff([]string{"a aborted", "b aborted", "c aborted", "anonymous 1 aborted", "anonymous 2 aborted"}, told); diff != "" {
		t.Errorf("told (-want +got)\n%s", diff)
	}
	told = nil
	if got := h.Attach("a", mk("late")); got != nil {
		t.Errorf("still attached when settled: %v", got)
	}
	if diff := cmp.Diff([]string{"late aborted"}, told); diff != "" {
		t.Errorf("told (-want +got)\n%s", diff)
	}
}

// TestAttachOnce: of several that attach under one key while the request ends, one is
// attached at most, and all who were told nil are told the outcome once.
func TestAttachOnce(t *testing.T) {
	for range *rounds {
		own, _ := abort.New(context.Background())
		var told, attached atomic.Int32
		attach := func() {
			if own.Handle().Attach("key", settler(func(abort.Outcome) { told.Add(1) })) == nil {
				attached.Add(1)
			}
		}
		together(attach, attach, own.Close)
		if told.Load() != attached.Load() || attached.Load() == 0 {
			t.Fatalf("%d attached, %d told", attached.Load(), told.Load())
		}
	}
}

// TestKeptHandle: whoever keeps a handle keeps nothing alive that was attached to it.
func TestKeptHandle(t *testing.T) {
	type index struct {
		_ [1 << 10]byte
		settler
	}
	for _, n := range []int{1, 2, 3, 9} {
		for name, end := range map[string]func(*abort.Owner){
			"abort":    func(o *abort.Owner) { o.Handle().Abort(abort.Preempted) },
			"complete": func(o *abort.Owner) { o.Settle(abort.Completed) },
		} {
			t.Run(fmt.Sprintf("%d/%s", n, name), func(t *testing.T) {
				own, ctx := abort.New(context.Background())
				defer own.Close()
				var kept []weak.Pointer[index]
				for i := range n {
					s := &index{settler: func(abort.Outcome) {}}
					own.Handle().Attach(i, s)
					kept = append(kept, weak.Make(s))
				}
				runtime.GC()
				for i, p := range kept {
					if p.Value() == nil {
						t.Fatalf("%d is gone before the end", i)
					}
				}
				end(own)
				runtime.GC()
				runtime.GC()
				for i, p := range kept {
					if p.Value() != nil {
						t.Errorf("%d is kept", i)
					}
				}
				runtime.KeepAlive(ctx)
			})
		}
	}
}
