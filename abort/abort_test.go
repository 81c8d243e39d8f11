package abort_test

import (
	"context"
	"errors"
	"flag"
	"go/build"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/abort"
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

// causeOf returns the abort that ended ctx, or nil.
func causeOf(ctx context.Context) *abort.Error {
	e, _ := errors.AsType[*abort.Error](context.Cause(ctx))
	return e
}

func TestStdOnly(t *testing.T) {
	p, err := build.ImportDir(".", 0)
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range p.Imports {
		if strings.Contains(path, ".") {
			t.Errorf("package abort imports %s", path)
		}
	}
}

func TestReasonString(t *testing.T) {
	for _, tc := range []struct {
		name string
		in   abort.Reason
		want string
	}{
		{"empty", "", "unspecified"},
		{"preempted", abort.Preempted, "preempted"},
		{"overloaded", abort.Overloaded, "overloaded"},
		{"draining", abort.Draining, "draining"},
		{"canceled", abort.Canceled, "canceled"},
		{"digits and dashes", "tier-2-0", "tier-2-0"},
		{"upper case", "KVCache", "kvcache"},
		{"first byte bad", " a", "-a"},
		{"last byte bad", "a ", "a-"},
		{"punctuation", "a.b_c/d:e", "a-b-c-d-e"},
		{"header injection", "x\r\nset-cookie: a", "x--set-cookie--a"},
		{"nul", "a\x00b", "a-b"},
		{"beyond ASCII, each byte", "é", "--"},
		{"no UTF-8", "\xff\xfe", "--"},
		{"neighbours of the ranges", "`{/:@[", "------"},
		{"64 bytes", abort.Reason(strings.Repeat("a", 64)), strings.Repeat("a", 64)},
		{"65 bytes", abort.Reason(strings.Repeat("a", 65)), strings.Repeat("a", 64)},
		{"64 KiB", abort.Reason(strings.Repeat("A", 64<<10)), strings.Repeat("a", 64)},
		{"a rune across the cut", abort.Reason(strings.Repeat("a", 63) + "é"), strings.Repeat("a", 63) + "-"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if diff := cmp.Diff(tc.want, tc.in.String()); diff != "" {
				t.Errorf("(-want +got)\n%s", diff)
			}
		})
	}
	if n := testing.AllocsPerRun(100, func() { _ = abort.Preempted.String() }); n != 0 {
		t.Errorf("a label allocates %v times", n)
	}
}

func FuzzReason(f *testing.F) {
	for _, s := range []string{"", "preempted", "Out Of KV", "a\r\nb", "\xff", "é", strings.Repeat("x", 65), "---", "Z9-"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		got := abort.Reason(s).String()
		if got == "" || len(got) > 64 || !utf8.ValidString(got) || strings.Trim(got, "abcdefghijklmnopqrstuvwxyz0123456789-") != "" {
			t.Errorf("%q becomes %q", s, got)
		}
		if s != "" && len(got) != min(len(s), 64) {
			t.Errorf("%q becomes %q, of another length", s, got)
		}
		if again := abort.Reason(got).String(); again != got {
			t.Errorf("%q becomes %q, and that %q", s, got, again)
		}
	})
}

func TestNames(t *testing.T) {
	got := []string{
		abort.Pending.String(), abort.Completed.String(), abort.Aborted.String(), abort.Closed.String(), abort.Outcome(4).String(),
		abort.Unknown.String(), abort.Waiting.String(), abort.Held.String(), abort.Streaming.String(), abort.Phase(4).String(), abort.Phase(-1).String(),
		(&abort.Error{Reason: "Not\nA Label"}).Error(),
	}
	want := []string{
		"pending", "completed", "aborted", "closed", "invalid",
		"unknown", "waiting", "held", "streaming", "invalid", "invalid",
		"abort: request aborted: not-a-label",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

func TestAborterFunc(t *testing.T) {
	own, ctx := abort.New(t.Context())
	defer own.Close()
	no := errors.New("no")
	var a abort.Aborter = abort.AborterFunc(func(c context.Context, h *abort.Handle, r abort.Reason) error {
		if c != ctx || h != own.Handle() || r != abort.Draining {
			t.Error("called with other arguments")
		}
		return no
	})
	if err := a.Abort(ctx, own.Handle(), abort.Draining); err != no {
		t.Errorf("Abort: %v", err)
	}
}
