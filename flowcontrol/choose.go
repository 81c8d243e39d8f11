package flowcontrol

import (
	"math"
	"slices"
	"time"

	"github.com/extevict/extevict/abort"
)

// A candidate may become a victim.
type candidate struct {
	x        *holding
	priority int
	size     float64
	taken    bool
}

// chooseLocked completes d, and returns its victims if they are to end.
func (r *Reclaimer) chooseLocked(s *scope, p *Pressure, waiting []Waiting, present []*holding, order []*abort.Handle, now time.Time, d *Decision) *trial {
	a := r.accountLocked(s, p, waiting, present, now) // some other call may have evicted by now
	of := make(map[*abort.Handle]*holding, len(present))
	for _, x := range present {
		of[x.h] = x
	}
	var cs []candidate
	for _, h := range order {
		x := of[h]
		if x == nil || !x.left.IsZero() || !x.chosen.IsZero() || now.Before(x.spared) || len(x.reqs) == 0 || x.reqs[0].Evictions >= maxAttempts {
			continue
		}
		if n := a.size(x, p.Endpoint); n > 0 {
			cs = append(cs, candidate{x: x, priority: x.reqs[0].Priority, size: n})
		}
	}

	budget := time.Duration(a.endpoints) * budgetBurst
	if !s.filled.IsZero() {
		budget = min(budget, s.budget+now.Sub(s.filled)*time.Duration(a.endpoints)/budgetShare)
	}
	s.budget, s.filled = budget, now
	for n := len(waiting); ; n /= 2 { // for fewer if it costs too much
		c := cover(&a, p, waiting[:n], cs)
		d.Why, d.For, d.Need, d.Freed, d.Coming, d.Victims, d.Lost = c.why, waiting[c.first], whole(c.need), 0, whole(a.coming), nil, 0
		for i := range cs {
			if cs[i].taken {
				v := cs[i].victim(now)
				d.Victims = append(d.Victims, v)
				d.Freed += whole(cs[i].size)
				d.Lost += v.Lost
			}
		}
		if d.Lost <= s.budget {
			break
		}
		if n == 1 {
			d.Why, d.Freed, d.Victims, d.Lost = Budget, 0, nil, 0
			break
		}
	}
	if len(d.Victims) == 0 || d.DryRun {
		return nil
	}
	t := &trial{at: now, unit: a.unit}
	for i := range cs {
		if cs[i].taken {
			cs[i].x.chosen = now
			t.victims, t.sizes = append(t.victims, cs[i].x), append(t.sizes, cs[i].size)
		}
	}
	s.budget -= d.Lost
	s.unproven = append(s.unproven, t)
	return t
}

// victim describes c as it is now.
func (c *candidate) victim(now time.Time) Victim {
	tokens, _ := c.x.at("")
	g := c.x.h.Progress()
	lost := min(float64(lostBase)+float64(tokens)*float64(lostToken)+float64(g.Chunks)*float64(lostChunk), float64(time.Hour))
	return Victim{
		Handle: c.x.h, Priority: c.priority, Tokens: tokens, Generated: g.Chunks,
		Age: now.Sub(c.x.added), Lost: time.Duration(lost),
	}
}

// A covering says what a choice of victims is for.
type covering struct {
	why   Why
	first int // of those that wait, who gets what comes free
	need  float64
}

// cover takes the candidates whose ends let as much as possible of what waits start: each is
// taken for one that matters more, and none is if the others are enough.
func cover(a *account, p *Pressure, waiting []Waiting, cs []candidate) covering {
	c := covering{why: Slot, first: -1}
	if a.tokens {
		c.why = KV
	}
	for i := range cs {
		cs[i].taken = false
	}
	var before, sum float64 // what starts before the next, and what is taken
	next := 0               // all candidates before are taken or matter too much
	alike := true           // all that get something may run anywhere and matter as much
	none := Nothing
	var failed []string
	for i := range waiting {
		w := &waiting[i]
		if failed != nil && slices.Equal(w.Endpoints, failed) {
			continue
		}
		need := a.need(p, before)
		had := sum
		var took []int
		from := 0
		if w.Endpoints == nil {
			from = next
		}
		for j := from; j < len(cs) && sum < need; j++ {
			if k := &cs[j]; !k.taken && k.priority < w.Priority && feasible(w, k.x, p.Endpoint) {
				k.taken = true
				took = append(took, j)
				sum += k.size
			}
			if w.Endpoints == nil {
				next = j + 1
			}
		}
		if sum < need {
			for _, j := range took {
				cs[j].taken = false
			}
			sum = had
			if w.Endpoints == nil {
				break // nor is there anything for those that matter less
			}
			failed = w.Endpoints
			continue
		}
		if need <= 0 {
			none = Coming
		} else {
			if c.first < 0 {
				c.first = i
			}
			c.need = need
			alike = alike && w.Endpoints == nil && w.Priority == waiting[c.first].Priority
		}
		if a.tokens {
			before += float64(w.Tokens)
		} else {
			before++
		}
	}
	if sum == 0 {
		return covering{why: none}
	}
	most, count := math.MinInt, 0
	for j := len(cs) - 1; j >= 0; j-- { // the most work is lost with the last
		k := &cs[j]
		if !k.taken {
			continue
		}
		if sum-k.size >= c.need {
			k.taken = false
			sum -= k.size
			continue
		}
		most = max(most, k.priority)
		count++
	}
	if count > 1 && alike {
		if j := slices.IndexFunc(cs, func(k candidate) bool { return k.size >= c.need && k.priority <= most }); j >= 0 {
			for i := range cs {
				cs[i].taken = i == j
			}
		}
	}
	return c
}

// feasible reports whether what x holds is of use to w.
func feasible(w *Waiting, x *holding, endpoint string) bool {
	return w.Endpoints == nil || endpoint != "" ||
		slices.ContainsFunc(x.reqs, func(q abort.Request) bool { return slices.Contains(w.Endpoints, q.Endpoint) })
}
