package evictor

import (
	"slices"

	"github.com/extevict/extevict/abort"
)

// entry is one tracked request. It hangs on the request's handle and, while it holds
// something, is listed in the set of all and in that of each endpoint it occupies.
type entry struct {
	v       *Evictor
	h       *abort.Handle
	seq     uint64 // of its dispatch: a snapshot that has another is stale
	all     link
	leg     link   // at its first endpoint
	legs    []link // at the others
	claimed bool   // an eviction has it; it keeps its place in case that fails
	dead    bool   // settled or gone: never listed again
}

func (e *entry) listed() bool { return e.all.band != nil }

// link is one membership in one band.
type link struct {
	prev, next *link
	band       *band
	e          *entry
}

// band is the requests of one priority in one set, the latest dispatched last. root
// closes the circle.
type band struct {
	priority int
	root     link
	set      *set
}

func (b *band) empty() bool { return b.root.next == &b.root }

// set is bands by ascending priority. It keeps a few that are empty, so that a
// request which comes and goes does not make one each time.
type set struct {
	name  string
	bands []*band
	n     int // links
	idle  int // empty bands
}

// How many empty ones stay beside the others, at least.
const (
	keepBands = 16 // of a set
	keepSets  = 64
)

func (s *set) push(l *link, priority int) {
	i, ok := slices.BinarySearchFunc(s.bands, priority, func(b *band, p int) int {
		switch {
		case b.priority < p:
			return -1
		case b.priority > p:
			return 1
		}
		return 0
	})
	if !ok {
		b := &band{priority: priority, set: s}
		b.root.prev, b.root.next = &b.root, &b.root
		s.bands = slices.Insert(s.bands, i, b)
		s.idle++
	}
	b := s.bands[i]
	if b.empty() {
		s.idle--
	}
	l.band, l.prev, l.next = b, b.root.prev, &b.root
	l.prev.next, l.next.prev = l, l
	s.n++
}

func (l *link) drop() {
	s := l.band.set
	l.prev.next, l.next.prev = l.next, l.prev
	if l.band.empty() {
		s.idle++
		if s.idle > keepBands+len(s.bands)/2 {
			// Into a new slice, since one that grew does not shrink.
			s.bands = slices.Clone(slices.DeleteFunc(s.bands, (*band).empty))
			s.idle = 0
		}
	}
	l.prev, l.next, l.band = nil, nil, nil
	s.n--
}

// order iterates over the set's requests and their priorities in the default order of
// eviction.
func (s *set) order(yield func(int, *entry) bool) {
	for _, b := range s.bands {
		for l := b.root.prev; l != &b.root; l = l.prev {
			if !yield(b.priority, l.e) {
				return
			}
		}
	}
}

// setLocked returns the set that a demand for the endpoint chooses from.
func (v *Evictor) setLocked(endpoint string) *set {
	if endpoint == "" {
		return &v.all
	}
	if s := v.endpoints[endpoint]; s != nil {
		return s
	}
	return &set{}
}

func (v *Evictor) listLocked(e *entry, reqs []abort.Request) {
	priority := reqs[0].Priority
	e.all.e = e
	v.all.push(&e.all, priority)
	e.legs = nil
	if len(reqs) > 1 {
		e.legs = make([]link, 0, len(reqs)-1) // links must not move
	}
	for i := range reqs {
		name := reqs[i].Endpoint
		if slices.ContainsFunc(reqs[:i], func(r abort.Request) bool { return r.Endpoint == name }) {
			continue
		}
		l := &e.leg
		if i > 0 {
			e.legs = append(e.legs, link{})
			l = &e.legs[len(e.legs)-1]
		}
		l.e = e
		v.endpointLocked(name).push(l, priority)
	}
}

func (v *Evictor) endpointLocked(name string) *set {
	s := v.endpoints[name]
	if s == nil {
		if v.endpoints == nil {
			v.endpoints = make(map[string]*set)
		}
		s = &set{name: name}
		v.endpoints[name] = s
		v.idle++
	}
	if s.n == 0 {
		v.idle--
	}
	return s
}

func (v *Evictor) unlistLocked(e *entry) {
	if !e.listed() {
		return
	}
	e.all.drop()
	v.dropLegLocked(&e.leg)
	for i := range e.legs {
		v.dropLegLocked(&e.legs[i])
	}
}

func (v *Evictor) dropLegLocked(l *link) {
	s := l.band.set
	l.drop()
	if s.n > 0 {
		return
	}
	v.idle++
	if v.idle > keepSets+len(v.endpoints)/2 {
		// Into a new map, since one that grew does not shrink.
		busy := make(map[string]*set, len(v.endpoints)-v.idle)
		for name, s := range v.endpoints {
			if s.n > 0 {
				busy[name] = s
			}
		}
		v.endpoints, v.idle = busy, 0
	}
}

// Settled implements abort.Settler.
func (e *entry) Settled(abort.Outcome) { e.v.bury(e) }

// bury ends the tracking of e.
func (v *Evictor) bury(e *entry) {
	v.mu.Lock()
	defer v.mu.Unlock()
	e.dead = true
	v.unlistLocked(e)
}

// putBack makes a claimed entry a candidate again.
func (v *Evictor) putBack(e *entry) {
	v.mu.Lock()
	defer v.mu.Unlock()
	e.claimed = false
}

// claimNewest claims up to n requests that d allows, in the default order.
func (v *Evictor) claimNewest(d *Demand, n int) (es []*entry) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for priority, e := range v.setLocked(d.Endpoint).order {
		if priority >= d.Below || len(es) == n {
			break
		}
		if !e.claimed {
			e.claimed = true
			es = append(es, e)
		}
	}
	return es
}

// snapshot returns the requests that d's priority and endpoint allow, in the default order.
func (v *Evictor) snapshot(d *Demand) []candidate {
	v.mu.Lock()
	defer v.mu.Unlock()
	s := v.setLocked(d.Endpoint)
	cs := make([]candidate, 0, s.n)
	for priority, e := range s.order {
		if priority >= d.Below {
			break
		}
		if !e.claimed {
			cs = append(cs, candidate{Victim: Victim{Handle: e.h}, e: e, seq: e.seq, priority: priority})
		}
	}
	return cs
}

// claim claims those of a snapshot that have not changed since.
func (v *Evictor) claim(cs []candidate) (es []*entry) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for i := range cs {
		if e := cs[i].e; !e.claimed && !e.dead && e.seq == cs[i].seq {
			e.claimed = true
			es = append(es, e)
		}
	}
	return es
}
