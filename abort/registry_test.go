package abort_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/extevict/extevict/abort"
)

// request returns a request registered under the ids.
func request(t testing.TB, reg *abort.Registry, ids ...string) *abort.Owner {
	own, _ := abort.New(context.Background())
	t.Cleanup(own.Close)
	for _, id := range ids {
		reg.Add(id, own.Handle())
	}
	return own
}

// Invariant 2: an id that repeats means all who carry it, and nobody else.
func TestRepeatedID(t *testing.T) {
	var reg abort.Registry
	var same []*abort.Owner
	for range 8 {
		same = append(same, request(t, &reg, "same"))
	}
	other := request(t, &reg, "other")
	same[3].Settle(abort.Completed)
	same[7].Close() // the newest
	same[0].Close() // the oldest
	var want []*abort.Handle
	for _, i := range []int{6, 5, 4, 2, 1} {
		want = append(want, same[i].Handle())
	}
	if got := reg.Lookup("same"); !slices.Equal(got, want) {
		t.Errorf("Lookup: not the five others, the newest first: %v", got)
	}
	if reg.Len() != 6 {
		t.Errorf("Len = %d, want 6", reg.Len())
	}
	want[2].Abort(abort.Preempted)
	if n := reg.Abort("same", abort.Canceled); n != 4 {
		t.Errorf("Abort = %d, want 4", n)
	}
	if n := reg.Abort("same", abort.Canceled); n != 0 {
		t.Errorf("Abort again = %d, want 0", n)
	}
	if other.Handle().Outcome() != abort.Pending || reg.Len() != 1 {
		t.Errorf("other %v, %d registered", other.Handle().Outcome(), reg.Len())
	}

	// A retry with the id of one that was aborted and is not gone yet.
	retry := request(t, &reg, "same")
	if got := reg.Lookup("same"); len(got) != 1 || got[0] != retry.Handle() {
		t.Errorf("Lookup = %v, want the retry", got)
	}
	want[0].Abort(abort.Canceled)
	same[6].Close()
	if retry.Handle().Outcome() != abort.Pending || reg.Len() != 2 {
		t.Error("the clean-up of an old request hit its retry")
	}
	if n := reg.Abort("same", abort.Canceled); n != 1 {
		t.Errorf("Abort of the retry = %d, want 1", n)
	}
}

func TestSeveralIDs(t *testing.T) {
	var reg, elsewhere abort.Registry
	own := request(t, &reg, "a", "a", "b", "a")
	elsewhere.Add("a", own.Handle())
	if reg.Len() != 2 || elsewhere.Len() != 1 {
		t.Errorf("Len = %d and %d, want 2 and 1", reg.Len(), elsewhere.Len())
	}
	ids := map[string]int{}
	for id, h := range reg.All() {
		if h != own.Handle() {
			t.Error("All: another handle")
		}
		ids[id]++
	}
	if diff := cmp.Diff(map[string]int{"a": 1, "b": 1}, ids); diff != "" {
		t.Errorf("All (-want +got)\n%s", diff)
	}
	if n := reg.Abort("b", abort.Canceled); n != 1 || reg.Len() != 0 || elsewhere.Len() != 0 {
		t.Errorf("aborted %d; %d and %d left", n, reg.Len(), elsewhere.Len())
	}
	reg.Add("a", own.Handle())
	if reg.Len() != 0 || reg.Lookup("a") != nil {
		t.Error("a settled request was registered")
	}
}

// TestDepartedClient: a request whose client has left is no victim.
func TestDepartedClient(t *testing.T) {
	var reg abort.Registry
	parent, leave := context.WithCancel(context.Background())
	own, _ := abort.New(parent)
	reg.Add("id", own.Handle())
	leave()
	if n := reg.Abort("id", abort.Canceled); n != 0 || reg.Len() != 0 {
		t.Errorf("aborted %d, %d registered", n, reg.Len())
	}
	own.Close()
}

func TestIDs(t *testing.T) {
	long := strings.Repeat("x", 64<<10)
	for _, tc := range []struct {
		name  string
		id    string
		short bool // is listed as it is
	}{
		{"plain", "req-1", true},
		{"control bytes", "a\x00\r\n\x1b[31m", true},
		{"no UTF-8", "\xff\xfe", true},
		{"256 bytes", long[:256], true},
		{"257 bytes", long[:257], false},
		{"64 KiB", long, false},
		{"64 KiB of control bytes", strings.Repeat("\x00", 64<<10), false},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var reg abort.Registry
			own := request(t, &reg, tc.id)
			near := request(t, &reg, tc.id[:len(tc.id)-1]+"~")
			var label string
			for id, h := range reg.All() {
				if len(id) > 256 {
					t.Errorf("All: an id of %d bytes", len(id))
				}
				if h == own.Handle() {
					label = id
				}
			}
			if tc.short && label != tc.id {
				t.Errorf("listed as %q", label)
			}
			if !strings.HasPrefix(tc.id, label[:min(len(label), 191)]) {
				t.Errorf("listed as %q, which does not begin like it", label)
			}
			for _, id := range []string{tc.id, label} {
				if got := reg.Lookup(id); len(got) != 1 || got[0] != own.Handle() {
					t.Errorf("Lookup of %d bytes: %v", len(id), got)
				}
			}
			reg.Add(label, own.Handle())
			if reg.Len() != 2 {
				t.Errorf("Len = %d: the label is another id", reg.Len())
			}
			if n := reg.Abort(label, abort.Canceled); n != 1 {
				t.Errorf("Abort by label = %d", n)
			}
			if near.Handle().Outcome() != abort.Pending {
				t.Error("a similar id was hit")
			}
		})
	}
}

// TestLongIDIsNotKept: a registered request does not keep 64 KiB that a client sent, nor a
// buffer that its id is a part of.
func TestLongIDIsNotKept(t *testing.T) {
	var reg abort.Registry
	const n = 500
	before := heap()
	for i := range n {
		long := fmt.Sprint(i, strings.Repeat("x", 64<<10))
		request(t, &reg, long)
		request(t, &reg, long[:20])
	}
	if grown := heap() - before; grown > 4<<10*n {
		t.Errorf("%d B for each", grown/n)
	}
	runtime.KeepAlive(&reg)
}

func TestEmptyID(t *testing.T) {
	var reg abort.Registry
	own := request(t, &reg, "")
	own2 := request(t, &reg, "")
	if reg.Lookup("") != nil || reg.Abort("", abort.Canceled) != 0 {
		t.Error("an empty argument found somebody")
	}
	n := 0
	for id, h := range reg.All() {
		if id != "" || h != own.Handle() && h != own2.Handle() {
			t.Errorf("All: %q, %v", id, h)
		}
		n++
	}
	if n != 2 || reg.Len() != 2 {
		t.Errorf("%d listed, Len = %d, want 2", n, reg.Len())
	}
	own.Close()
	own2.Close()
	if reg.Len() != 0 {
		t.Errorf("Len = %d at the end", reg.Len())
	}
}

func TestZeroRegistry(t *testing.T) {
	var reg abort.Registry
	if reg.Len() != 0 || reg.Lookup("x") != nil || reg.Abort("x", abort.Canceled) != 0 {
		t.Error("not empty")
	}
	for id := range reg.All() {
		t.Errorf("All: %q", id)
	}
}

// TestAllStops: the loop may end early, and may change the registry.
func TestAllStops(t *testing.T) {
	var reg abort.Registry
	for i := range 10 {
		request(t, &reg, fmt.Sprint(i%3))
	}
	n := 0
	for range reg.All() {
		if n++; n == 4 {
			break
		}
	}
	if n != 4 {
		t.Errorf("%d before the break", n)
	}
	within(t, func() {
		for _, h := range reg.All() {
			h.Abort(abort.Canceled)
			request(t, &reg, "new")
		}
	})
	if reg.Len() != 10 || len(reg.Lookup("new")) != 10 {
		t.Errorf("Len = %d, want the 10 new ones", reg.Len())
	}
}

// TestRegistryRace: every request that an id names while it runs is found, ended once and
// forgotten, whatever else happens.
func TestRegistryRace(t *testing.T) {
	var reg abort.Registry
	var aborted, counted atomic.Int64
	var stop atomic.Bool
	ids := []string{"a", "b", "", strings.Repeat("l", 300)}
	id := func() string { return ids[rand.IntN(len(ids))] }
	serve := func() {
		for range *rounds {
			own, _ := abort.New(context.Background())
			i := id()
			reg.Add(i, own.Handle())
			if rand.IntN(2) == 0 {
				reg.Add(id(), own.Handle())
			}
			if own.Handle().Outcome() == abort.Pending && i != "" && !slices.Contains(reg.Lookup(i), own.Handle()) && own.Handle().Outcome() == abort.Pending {
				t.Error("a request in flight is not found")
			}
			if rand.IntN(2) == 0 {
				runtime.Gosched()
			}
			if rand.IntN(2) == 0 {
				own.Settle(abort.Completed)
			}
			own.Close()
			if own.Handle().Outcome() == abort.Aborted {
				aborted.Add(1)
			}
		}
	}
	look := func() {
		for !stop.Load() {
			counted.Add(int64(reg.Abort(id(), abort.Canceled)))
			for range reg.All() {
			}
			reg.Len()
			runtime.Gosched()
		}
	}
	together(func() { together(serve, serve, serve); stop.Store(true) }, look, look)
	if aborted.Load() != counted.Load() {
		t.Errorf("%d aborted, %d counted", aborted.Load(), counted.Load())
	}
	if reg.Len() != 0 || len(maps.Collect(reg.All())) != 0 {
		t.Errorf("%d left", reg.Len())
	}
}

// Invariant 3: aborts of unknown and of finished requests leave nothing.
func TestFlatMemory(t *testing.T) {
	const n = 1_000_000
	var reg abort.Registry
	done := request(t, &reg, "done")
	done.Close()
	unknown := make([]string, 1000)
	for i := range unknown {
		unknown[i] = fmt.Sprint("unknown-", i)
	}
	before := heap()
	for i := range n {
		if i%2 == 0 && reg.Abort(unknown[i%len(unknown)], abort.Canceled) != 0 || i%2 == 1 && done.Handle().Abort(abort.Canceled) {
			t.Fatal("ended what does not run")
		}
		if i%50 == 0 { // requests that come, are registered, and go
			own, _ := abort.New(context.Background())
			reg.Add(unknown[i%len(unknown)], own.Handle())
			own.Close()
		}
	}
	if grown := heap() - before; grown > 64<<10 {
		t.Errorf("%d B grown after %d aborts", grown, n)
	}
}

// Invariant 3: an empty registry gives its memory back.
func TestEmptyGivesBack(t *testing.T) {
	var reg abort.Registry
	const n = 50_000
	owners := make([]*abort.Owner, n)
	for i := range owners {
		owners[i], _ = abort.New(context.Background())
	}
	before := heap()
	for i := range owners {
		reg.Add(fmt.Sprint("request-", i), owners[i].Handle())
	}
	full := heap() - before
	for _, own := range owners {
		own.Close()
	}
	if left := heap() - before; reg.Len() != 0 || left > full/50 {
		t.Errorf("%d registered; %d B of %d B kept", reg.Len(), left, full)
	}
	runtime.KeepAlive(owners)
	runtime.KeepAlive(&reg)
}
