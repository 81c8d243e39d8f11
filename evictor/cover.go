package evictor

import (
	"math"
	"slices"
)

// candidate is a request in a snapshot.
type candidate struct {
	Victim
	e        *entry
	seq      uint64 // tells whether e was tracked anew since
	priority int
	tokens   int64 // what it frees for the demand
}

func sortCandidates(cs []candidate, compare func(a, b Victim) int) {
	slices.SortStableFunc(cs, func(a, b candidate) int { return compare(a.Victim, b.Victim) })
}

// cover splits the candidates, which are in order, into those that free the tokens
// and the rest. It chooses none if they can't, or only with more than a positive n.
//
// This is the greedy answer to a minimum knapsack cover, mended in the two ways in
// which it goes wrong: by many small requests that a larger one makes needless, and by a
// single one that would have done.
func cover(cs []candidate, tokens int64, n int) (chosen, rest []candidate) {
	var sum uint64 // less than tokens and one candidate's more: no overflow
	need := uint64(tokens)
	last := 0 // one behind the last that is needed
	for last < len(cs) && sum < need {
		sum += uint64(cs[last].tokens)
		last++
	}
	if sum < need {
		return nil, cs
	}
	take := make([]bool, len(cs))
	count, highest := 0, math.MinInt
	for i := last - 1; i >= 0; i-- { // the most work is lost with the last
		if t := uint64(cs[i].tokens); sum-t >= need {
			sum -= t
			continue
		}
		take[i] = true
		count++
		highest = max(highest, cs[i].priority)
	}
	if count > 1 {
		if i := slices.IndexFunc(cs, func(c candidate) bool { return c.tokens >= tokens && c.priority <= highest }); i >= 0 {
			clear(take)
			take[i], count = true, 1
		}
	}
	if n > 0 && count > n {
		return nil, cs
	}
	chosen, rest = make([]candidate, 0, count), make([]candidate, 0, len(cs)-count)
	for i, c := range cs {
		if take[i] {
			chosen = append(chosen, c)
		} else {
			rest = append(rest, c)
		}
	}
	return chosen, rest
}
