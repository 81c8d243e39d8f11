package abort_test

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/abort"
)

type valueKey struct{}

// foreign is a context of somebody's own type.
type foreign struct{ context.Context }

// children makes children of every kind.
var children = []struct {
	name string
	make func(context.Context) (context.Context, context.CancelFunc)
}{
	{"the context itself", func(c context.Context) (context.Context, context.CancelFunc) { return c, func() {} }},
	{"WithCancel", context.WithCancel},
	{"WithCancelCause", func(c context.Context) (context.Context, context.CancelFunc) {
		c, cancel := context.WithCancelCause(c)
		return c, func() { cancel(nil) }
	}},
	{"WithTimeout", func(c context.Context) (context.Context, context.CancelFunc) {
		return context.WithTimeout(c, time.Hour)
	}},
	{"WithValue", func(c context.Context) (context.Context, context.CancelFunc) {
		return context.WithValue(c, valueKey{}, 1), func() {}
	}},
	{"WithCancel of WithValue", func(c context.Context) (context.Context, context.CancelFunc) {
		return context.WithCancel(context.WithValue(c, valueKey{}, 1))
	}},
	{"somebody's own type", func(c context.Context) (context.Context, context.CancelFunc) { return foreign{c}, func() {} }},
	{"WithCancel of somebody's own type", func(c context.Context) (context.Context, context.CancelFunc) {
		return context.WithCancel(foreign{c})
	}},
	{"a nested request", func(c context.Context) (context.Context, context.CancelFunc) {
		own, c := abort.New(c)
		return c, own.Close
	}},
	{"WithCancel of a nested request", func(c context.Context) (context.Context, context.CancelFunc) {
		own, c := abort.New(c)
		c, cancel := context.WithCancel(c)
		return c, func() { cancel(); own.Close() }
	}},
}

func TestChildren(t *testing.T) {
	gone := errors.New("gone")
	type end struct {
		name  string
		do    func(*abort.Owner, context.CancelCauseFunc)
		abort bool  // the cause is the abort
		cause error // else
	}
	ends := []end{
		{"abort", func(o *abort.Owner, _ context.CancelCauseFunc) { o.Handle().Abort(abort.Preempted) }, true, nil},
		{"abort and close", func(o *abort.Owner, _ context.CancelCauseFunc) { o.Handle().Abort(abort.Preempted); o.Close() }, true, nil},
		{"abort, then the client leaves", func(o *abort.Owner, leave context.CancelCauseFunc) {
			o.Handle().Abort(abort.Preempted)
			leave(gone)
		}, true, nil},
		{"close", func(o *abort.Owner, _ context.CancelCauseFunc) { o.Close() }, false, context.Canceled},
		{"close, then the client leaves", func(o *abort.Owner, leave context.CancelCauseFunc) { o.Close(); leave(gone) }, false, nil},
		{"the client leaves", func(_ *abort.Owner, leave context.CancelCauseFunc) { leave(gone) }, false, gone},
		{"the client leaves, then an abort", func(o *abort.Owner, leave context.CancelCauseFunc) {
			leave(gone)
			o.Handle().Abort(abort.Preempted)
		}, false, gone},
	}
	for _, e := range ends {
		for _, kind := range children {
			for _, when := range []string{"before", "after"} {
				t.Run(fmt.Sprintf("%s/%s made %s", e.name, kind.name, when), func(t *testing.T) {
					parent, leave := context.WithCancelCause(context.Background())
					defer leave(nil)
					own, ctx := abort.New(parent)
					defer own.Close()
					var c context.Context
					var cancel context.CancelFunc
					if when == "before" {
						c, cancel = kind.make(ctx)
						if c.Err() != nil || context.Cause(c) != nil {
							t.Errorf("ended before its time: %v, cause %v", c.Err(), context.Cause(c))
						}
						e.do(own, leave)
					} else {
						e.do(own, leave)
						c, cancel = kind.make(ctx)
					}
					defer cancel()
					select {
					case <-c.Done():
					case <-time.After(10 * time.Second):
						t.Fatal("not done")
					}
					if c.Err() != context.Canceled {
						t.Errorf("Err = %v", c.Err())
					}
					switch cause := context.Cause(c); {
					case e.abort && (cause != own.Handle().Err() || causeOf(c).Reason != abort.Preempted):
						t.Errorf("cause = %v, want the abort", cause)
					case !e.abort && causeOf(c) != nil:
						t.Errorf("cause = %v, without an abort", cause)
					case e.cause != nil && cause != e.cause:
						t.Errorf("cause = %v, want %v", cause, e.cause)
					}
				})
			}
		}
	}
}

func TestAfterFunc(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		own, ctx := abort.New(context.Background())
		var before, stopped, after atomic.Int32
		context.AfterFunc(ctx, func() {
			if ctx.Err() == nil || causeOf(ctx) == nil || own.Handle().Err() == nil || own.Handle().Outcome() != abort.Aborted {
				t.Error("runs before the abort is there")
			}
			before.Add(1)
		})
		stop := context.AfterFunc(ctx, func() { stopped.Add(1) })
		if !stop() {
			t.Error("stop: too late")
		}
		synctest.Wait()
		if before.Load() != 0 {
			t.Error("runs before the abort")
		}
		own.Handle().Abort(abort.Preempted)
		context.AfterFunc(ctx, func() { after.Add(1) })
		own.Close()
		synctest.Wait()
		if before.Load() != 1 || stopped.Load() != 0 || after.Load() != 1 {
			t.Errorf("calls: %d made before, %d stopped, %d made after", before.Load(), stopped.Load(), after.Load())
		}
	})
}

func TestWithoutCancel(t *testing.T) {
	own, ctx := abort.New(context.WithValue(context.Background(), valueKey{}, "v"))
	for range 2 { // without a child context and with one
		c := context.WithoutCancel(ctx)
		if c.Err() != nil || c.Done() != nil || context.Cause(c) != nil {
			t.Errorf("Err %v, cause %v", c.Err(), context.Cause(c))
		}
		if abort.FromContext(c) != own.Handle() || c.Value(valueKey{}) != "v" {
			t.Error("lost the handle or a value")
		}
		_ = ctx.Done()
	}
	own.Handle().Abort(abort.Preempted)
	c := context.WithoutCancel(ctx)
	child, cancel := context.WithCancel(c)
	defer cancel()
	if c.Err() != nil || child.Err() != nil || context.Cause(child) != nil {
		t.Errorf("an abort gets through: %v, %v, cause %v", c.Err(), child.Err(), context.Cause(child))
	}
}

func TestContextOfParent(t *testing.T) {
	deadline := time.Now().Add(time.Hour)
	parent, cancel := context.WithDeadline(context.WithValue(context.Background(), valueKey{}, "v"), deadline)
	defer cancel()
	own, ctx := abort.New(parent)
	defer own.Close()
	for range 2 {
		if d, ok := ctx.Deadline(); !ok || !d.Equal(deadline) {
			t.Errorf("Deadline = %v, %v", d, ok)
		}
		if v := ctx.Value(valueKey{}); v != "v" {
			t.Errorf("Value = %v", v)
		}
		if v := ctx.Value("none"); v != nil {
			t.Errorf("Value of no key = %v", v)
		}
		_ = ctx.Done()
	}
	if _, ok := context.Background().Deadline(); ok {
		t.Fatal("Background has a deadline")
	}
	own2, ctx2 := abort.New(context.Background())
	defer own2.Close()
	if d, ok := ctx2.Deadline(); ok {
		t.Errorf("Deadline = %v without one", d)
	}
}

func TestDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		parent, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		own, ctx := abort.New(parent)
		defer own.Close()
		<-ctx.Done()
		if ctx.Err() != context.DeadlineExceeded || context.Cause(ctx) != context.DeadlineExceeded {
			t.Errorf("Err %v, cause %v", ctx.Err(), context.Cause(ctx))
		}
		if own.Handle().Abort(abort.Preempted) || own.Handle().Outcome() != abort.Closed {
			t.Error("an abort won after the deadline")
		}
	})
}

// TestContextErrorIsForGood: what Err and Cause once said they say for ever, whatever
// happens to the parent later.
func TestContextErrorIsForGood(t *testing.T) {
	steps := map[string]func(*abort.Owner, context.Context){
		"abort": func(o *abort.Owner, _ context.Context) { o.Handle().Abort(abort.Preempted) },
		"close": func(o *abort.Owner, _ context.Context) { o.Close() },
		"sleep": func(*abort.Owner, context.Context) { time.Sleep(2 * time.Second) }, // the parent's deadline
		"Done":  func(_ *abort.Owner, c context.Context) { _ = c.Done() },
	}
	for _, seq := range []string{
		"close sleep", "sleep close", "abort sleep", "sleep abort", "Done close sleep", "Done sleep close",
		"close Done sleep", "sleep Done close", "abort close sleep", "close sleep Done", "sleep close Done",
	} {
		t.Run(seq, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				parent, cancel := context.WithTimeoutCause(context.Background(), time.Second, errors.New("gone"))
				defer cancel()
				own, ctx := abort.New(parent)
				defer own.Close()
				var first, cause error
				for _, step := range strings.Fields(seq) {
					steps[step](own, ctx)
					synctest.Wait()
					err := ctx.Err()
					if first == nil {
						first, cause = err, context.Cause(ctx)
						continue
					}
					if err != first || context.Cause(ctx) != cause {
						t.Errorf("after %s: %v, cause %v; before: %v, cause %v", step, err, context.Cause(ctx), first, cause)
					}
				}
				if first == nil {
					t.Error("never ended")
				}
			})
		})
	}
}

// TestClosedContext: when Close has returned, the context is done for everybody, also
// for those who are making its child at that moment.
func TestClosedContext(t *testing.T) {
	for range *rounds {
		own, ctx := abort.New(context.Background())
		var closed atomic.Bool
		check := func() {
			was := closed.Load()
			done := ctx.Done()
			if err := ctx.Err(); was && err != context.Canceled {
				t.Errorf("after Close: Err = %v", err)
			}
			if !was {
				return
			}
			select {
			case <-done:
			default:
				t.Error("after Close: not done")
			}
		}
		together(func() { own.Close(); closed.Store(true); check() }, check, check)
		check()
	}
}

func TestNestedOwners(t *testing.T) {
	outer, octx := abort.New(context.Background())
	inner, ictx := abort.New(context.WithValue(octx, valueKey{}, "v"))
	if abort.FromContext(ictx) != inner.Handle() || abort.FromContext(octx) != outer.Handle() {
		t.Fatal("FromContext: not the innermost")
	}
	if !inner.Handle().Abort(abort.Canceled) || octx.Err() != nil || outer.Handle().Outcome() != abort.Pending {
		t.Errorf("an abort of the inner reached the outer: %v, %v", octx.Err(), outer.Handle().Outcome())
	}
	inner.Close()

	inner, ictx = abort.New(octx)
	defer inner.Close()
	if !outer.Handle().Abort(abort.Preempted) {
		t.Fatal("Abort lost")
	}
	if inner.Handle().Abort(abort.Canceled) || inner.Handle().Outcome() != abort.Closed || inner.Handle().Err() != nil {
		t.Errorf("inner: %v, %v", inner.Handle().Outcome(), inner.Handle().Err())
	}
	if ictx.Err() == nil || context.Cause(ictx) != outer.Handle().Err() {
		t.Errorf("inner's context: %v, cause %v", ictx.Err(), context.Cause(ictx))
	}
	outer.Close()
}

// TestNoPropagationGoroutine: package context needs none to tie children to the
// request's context, nor that to its parent.
func TestNoPropagationGoroutine(t *testing.T) {
	parent, cancel := context.WithCancel(context.Background())
	defer cancel()
	for range 10 {
		own, ctx := abort.New(parent)
		defer own.Close()
		for _, kind := range children {
			_, cancel := kind.make(ctx)
			defer cancel()
		}
		defer context.AfterFunc(ctx, func() {})()
	}
	buf := make([]byte, 1<<20)
	if stacks := string(buf[:runtime.Stack(buf, true)]); strings.Contains(stacks, "propagateCancel") {
		t.Errorf("goroutines propagate:\n%s", stacks)
	}
}

// TestParentForgets: a request that is over leaves nothing with a parent that lives on.
func TestParentForgets(t *testing.T) {
	parent, cancel := context.WithCancel(context.Background())
	defer cancel()
	before := heap()
	for i := range 20_000 {
		own, ctx := abort.New(parent)
		_ = ctx.Done()
		if i%2 == 0 {
			own.Handle().Abort(abort.Preempted)
		}
		own.Close()
		_ = ctx.Done()
	}
	if grown := heap() - before; grown > 512<<10 {
		t.Errorf("%d B after 20,000 requests", grown)
	}
	runtime.KeepAlive(parent)
}

func TestContextString(t *testing.T) {
	own, ctx := abort.New(context.Background())
	defer own.Close()
	got := fmt.Sprint(context.WithValue(ctx, valueKey{}, "v"))
	if diff := cmp.Diff("abort.Context.WithValue(abort_test.valueKey, v)", got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

// heap is what is reachable.
func heap() int64 {
	runtime.GC()
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// TestParentsEndIsSeen checks that whoever knows of the parent's end finds it in the
// request's context, however many children the parent has to tell first.
func TestParentsEndIsSeen(t *testing.T) {
	for range 2000 {
		parent, cancel := context.WithCancel(t.Context())
		var others []context.CancelFunc
		for range 16 {
			_, c := context.WithCancel(parent)
			others = append(others, c)
		}
		own, ctx := abort.New(parent)
		ctx.Done() // somebody watches it
		go cancel()
		<-parent.Done()
		if err := ctx.Err(); err != context.Canceled {
			t.Fatalf("the parent has ended, the request's context says %v", err)
		}
		own.Close()
		for _, c := range others {
			c()
		}
	}
}
