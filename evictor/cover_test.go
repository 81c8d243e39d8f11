package evictor_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"math/big"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/extevict/extevict/abort"
	"github.com/extevict/extevict/evictor"
)

// held is a request at endpoint e that holds tokens.
type held struct {
	name     string
	priority int
	tokens   int64
}

func TestTokens(t *testing.T) {
	const huge = math.MaxInt64
	newest := []held{{"old", -1, 10}, {"mid", -1, 10}, {"new", -1, 10}}
	byTokens := evictor.WithOrder(func(a, b evictor.Victim) int { return cmp.Compare(b.Requests[0].Tokens, a.Requests[0].Tokens) })
	asTracked := evictor.WithOrder(func(a, b evictor.Victim) int { return strings.Compare(a.Requests[0].ID, b.Requests[0].ID) })
	for _, tc := range []struct {
		name string
		reqs []held // in the order of dispatch
		d    evictor.Demand
		opts []evictor.Option
		want string
	}{
		{"newest first", newest, evictor.Demand{Tokens: 20}, nil, "new mid"},
		{"exactly", newest, evictor.Demand{Tokens: 30}, nil, "new mid old"},
		{"one token", newest, evictor.Demand{Tokens: 1}, nil, "new"},
		{"one more than there is: nobody", newest, evictor.Demand{Tokens: 31}, nil, ""},
		{"nobody there", nil, evictor.Demand{Tokens: 1}, nil, ""},
		{"reprieve: a large one makes the small ones needless",
			[]held{{"large", -1, 100}, {"small", -1, 5}, {"tiny", -1, 1}}, evictor.Demand{Tokens: 100}, nil, "large"},
		{"reprieve of one of two", []held{{"c", -1, 50}, {"b", -1, 30}, {"a", -1, 60}}, evictor.Demand{Tokens: 110}, nil, "a c"},
		{"a single one does it alone", []held{{"single", -1, 20}, {"b", -1, 10}, {"a", -1, 10}}, evictor.Demand{Tokens: 20}, nil, "single"},
		{"the latest single one", []held{{"s1", -1, 50}, {"s2", -1, 20}, {"b", -1, 10}, {"a", -1, 10}}, evictor.Demand{Tokens: 20}, nil, "s2"},
		{"no single one of a higher priority", []held{{"single", -1, 20}, {"b", -2, 10}, {"a", -2, 10}}, evictor.Demand{Tokens: 20}, nil, "a b"},
		{"a single one of the highest priority chosen", []held{{"single", -1, 20}, {"b", -1, 10}, {"a", -2, 10}}, evictor.Demand{Tokens: 20}, nil, "single"},
		{"a lower band covers", []held{{"low", -5, 10}, {"new", -1, 10}}, evictor.Demand{Tokens: 10}, nil, "low"},
		{"a lower band is reprieved", []held{{"low", -5, 3}, {"new", -1, 10}}, evictor.Demand{Tokens: 10}, nil, "new"},
		{"two bands", []held{{"low", -5, 3}, {"new", -1, 10}}, evictor.Demand{Tokens: 13}, nil, "low new"},
		{"never from above", []held{{"low", -5, 3}, {"high", 0, 1000}}, evictor.Demand{Tokens: 4}, nil, ""},
		{"N is enough", newest, evictor.Demand{Tokens: 20, N: 2}, nil, "new mid"},
		{"N is too few: nobody", newest, evictor.Demand{Tokens: 20, N: 1}, nil, ""},
		{"N is too few but for a single one", []held{{"single", -1, 20}, {"b", -1, 10}, {"a", -1, 10}}, evictor.Demand{Tokens: 20, N: 1}, nil, "single"},
		{"N below zero is none", newest, evictor.Demand{Tokens: 20, N: -1}, nil, "new mid"},
		{"who holds nothing is spared", []held{{"b", -1, 10}, {"none", -1, 0}}, evictor.Demand{Tokens: 10}, nil, "b"},
		{"negative tokens are none", []held{{"b", -1, 10}, {"neg", -1, -5}, {"a", -1, 10}}, evictor.Demand{Tokens: 20}, nil, "a b"},
		{"only negative tokens", []held{{"neg", -1, math.MinInt64}}, evictor.Demand{Tokens: 1}, nil, ""},
		{"huge tokens", []held{{"b", -1, huge}, {"a", -1, huge}}, evictor.Demand{Tokens: huge}, nil, "a"},
		{"huge sums", []held{{"c", -1, huge / 2}, {"b", -1, huge / 2}, {"a", -1, 1}}, evictor.Demand{Tokens: huge}, nil, "a b c"},
		{"huge sums, reprieve", []held{{"d", -1, huge / 2}, {"c", -1, huge / 2}, {"b", -1, huge - 1}, {"a", -1, 1}}, evictor.Demand{Tokens: huge}, nil, "a b"},
		{"a demand that is huge", newest, evictor.Demand{Tokens: huge}, nil, ""},
		{"own order", []held{{"a", -1, 5}, {"b", -1, 50}, {"c", -1, 20}}, evictor.Demand{Tokens: 60}, []evictor.Option{byTokens}, "b c"},
		{"own order, no single one of a higher priority than the chosen",
			[]held{{"1", -1, 5}, {"2", -9, 50}, {"3", -9, 50}, {"4", -2, 100}}, evictor.Demand{Tokens: 100}, []evictor.Option{asTracked}, "2 3"},
		{"Spare", newest, evictor.Demand{Tokens: 20, Spare: func(h *abort.Handle) bool { return h.Requests()[0].ID == "new" }}, nil, "mid old"},
		{"elsewhere", newest, evictor.Demand{Tokens: 10, Endpoint: "z"}, nil, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			f := newFleet(t, tc.opts...)
			for _, r := range tc.reqs {
				f.track(r.name, abort.Request{ID: r.name, Endpoint: "e", Priority: r.priority, Tokens: r.tokens})
			}
			for _, endpoint := range []string{"e", ""} {
				if tc.d.Endpoint == "" || tc.d.Endpoint == endpoint {
					d := tc.d
					d.Endpoint, d.DryRun = endpoint, true
					f.want("dry run at "+endpoint, tc.want, f.evict(d))
				}
			}
			f.want("victims", tc.want, f.evict(tc.d))
			f.wantLen("the rest", len(tc.reqs)-len(strings.Fields(tc.want)))
		})
	}
}

// TestHugeLegs: sums over several legs don't turn negative, which would look like
// tokens still to be freed.
func TestHugeLegs(t *testing.T) {
	f := newFleet(t)
	f.track("y", at("e", -1))
	huge := abort.Request{Endpoint: "e", Priority: -1, Tokens: math.MaxInt64}
	f.track("x", huge, huge, huge)
	f.want("victims", "x", f.evict(evictor.Demand{Tokens: 5}))
	f.want("victims", "", f.evict(evictor.Demand{Tokens: 2}))
	f.want("victims", "y", f.evict(evictor.Demand{Tokens: 1, Endpoint: "e"}))
}

// TestTokensOfFailures: what fails is made up for, within N; nobody is evicted for
// what can't be freed any more.
func TestTokensOfFailures(t *testing.T) {
	for _, tc := range []struct {
		name  string
		reqs  []held
		fails string
		d     evictor.Demand
		want  string
	}{
		{"by the next", []held{{"d", -1, 10}, {"c", -1, 10}, {"b", -1, 10}, {"a", -1, 10}}, "a", evictor.Demand{Tokens: 20}, "b c"},
		{"by two", []held{{"c", -1, 5}, {"b", -1, 5}, {"a", -1, 10}}, "a", evictor.Demand{Tokens: 10}, "b c"},
		{"by one that was reprieved", []held{{"large", -1, 100}, {"a", -1, 100}, {"small", -1, 5}}, "a", evictor.Demand{Tokens: 100}, "large"},
		{"within N", []held{{"c", -1, 10}, {"b", -1, 10}, {"a", -1, 10}}, "a", evictor.Demand{Tokens: 20, N: 2}, "b c"},
		{"not beyond N", []held{{"c", -1, 5}, {"d", -1, 5}, {"b", -1, 10}, {"a", -1, 10}}, "a", evictor.Demand{Tokens: 20, N: 2}, "b"},
		{"not if the rest is not enough", []held{{"c", -1, 5}, {"b", -1, 10}, {"a", -1, 10}}, "a", evictor.Demand{Tokens: 20}, "b"},
		{"all fail", []held{{"b", -1, 10}, {"a", -1, 10}}, "a b", evictor.Demand{Tokens: 10}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var f *fleet
			f = newFleet(t, evictor.WithAborter(abort.AborterFunc(func(_ context.Context, h *abort.Handle, _ abort.Reason) error {
				if slices.Contains(strings.Fields(tc.fails), f.names[h]) {
					return errors.New(f.names[h])
				}
				return nil
			})))
			for _, r := range tc.reqs {
				f.track(r.name, abort.Request{Endpoint: "e", Priority: r.priority, Tokens: r.tokens})
			}
			hs, err := f.Evict(t.Context(), tc.d)
			got := strings.Fields(f.name(hs))
			slices.Sort(got)
			f.want("victims", tc.want, strings.Join(got, " "))
			if err == nil {
				t.Error("no error")
			}
			f.wantLen("the rest", len(tc.reqs)-len(got))
		})
	}
}

// TestCoverProperties: random requests and demands. Whoever is chosen lies below, they
// free enough, and nobody is chosen needlessly; nobody is chosen if that is because
// nobody could.
func TestCoverProperties(t *testing.T) {
	sum := func(hs []*abort.Handle, endpoint string, but int) *big.Int {
		n := new(big.Int)
		for i, h := range hs {
			for _, r := range h.Requests() {
				if i != but && r.Tokens > 0 && (endpoint == "" || r.Endpoint == endpoint) {
					n.Add(n, big.NewInt(r.Tokens))
				}
			}
		}
		return n
	}
	covered, impossible := 0, 0
	for range *rounds {
		seed := rand.Uint64()
		rnd := rand.New(rand.NewPCG(seed, 0))
		tokens := func() int64 {
			switch rnd.IntN(12) {
			case 0:
				return 0
			case 1:
				return -rnd.Int64N(100)
			case 2:
				return math.MaxInt64 - rnd.Int64N(3)
			case 3:
				return math.MaxInt64/2 + rnd.Int64N(3)
			}
			return rnd.Int64N(100)
		}
		var opts []evictor.Option
		if rnd.IntN(2) == 0 {
			opts = append(opts, evictor.WithOrder(func(a, b evictor.Victim) int {
				return cmp.Compare(a.Requests[0].Evictions, b.Requests[0].Evictions)
			}))
		}
		ev := evictor.New(opts...)
		var all []*abort.Handle
		d := evictor.Demand{Tokens: tokens(), Below: rnd.IntN(4) - 2, Endpoint: []string{"", "a", "b"}[rnd.IntN(3)], N: max(0, rnd.IntN(8)-4), DryRun: true}
		if rnd.IntN(2) == 0 {
			d.Tokens = rnd.Int64N(300)
		}
		if d.Tokens <= 0 {
			d.N = 0
		}
		for range rnd.IntN(9) {
			own, ctx := abort.New(context.Background())
			defer own.Close()
			var reqs []abort.Request
			for range 1 + rnd.IntN(2) {
				reqs = append(reqs, abort.Request{Endpoint: []string{"a", "b"}[rnd.IntN(2)], Priority: rnd.IntN(4) - 3, Tokens: tokens(), Evictions: rnd.IntN(5)})
			}
			ev.TrackRequests(ctx, reqs...)
			if reqs[0].Priority < d.Below && (d.Endpoint == "" || slices.ContainsFunc(reqs, func(r abort.Request) bool { return r.Endpoint == d.Endpoint })) {
				all = append(all, own.Handle())
			}
		}
		hs, err := ev.Evict(context.Background(), d)
		if err != nil {
			t.Fatal(err)
		}
		say := func(what string) {
			var s []string
			for _, h := range all {
				s = append(s, fmt.Sprint(h.Requests()))
			}
			t.Fatalf("seed %d: %s; %d chosen for %+v from\n%s", seed, what, len(hs), d, strings.Join(s, "\n"))
		}
		need := big.NewInt(d.Tokens)
		for i, h := range hs {
			if !slices.Contains(all, h) {
				say("a victim that the demand does not allow")
			}
			if slices.Contains(hs[:i], h) {
				say("a victim twice")
			}
			if sum(hs, d.Endpoint, i).Cmp(need) >= 0 {
				say("a needless victim")
			}
		}
		possible := d.Tokens > 0 && sum(all, d.Endpoint, -1).Cmp(need) >= 0
		switch {
		case len(hs) > 0 && sum(hs, d.Endpoint, -1).Cmp(need) < 0:
			say("does not cover")
		case d.N > 0 && len(hs) > d.N:
			say("more than N")
		case len(hs) == 0 && possible && d.N == 0:
			say("nobody chosen though it could be covered")
		}
		if len(hs) > 0 {
			covered++
		} else if !possible {
			impossible++
		}
	}
	if *rounds >= 1000 && (covered == 0 || impossible == 0) {
		t.Errorf("%d covered, %d impossible", covered, impossible)
	}
}
