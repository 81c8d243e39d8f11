package evictor

import (
	"slices"

	"github.com/extevict/extevict/abort"
)

// entry is one tracked request. It hangs on the request's handle, and while it is
// listed in the set of all and in that of each endpoint it occupies.
type entry struct {
	v     *Evictor
	h     *abort.Handle
	seq   uint64 // of its dispatch
	all   link
	leg   link   // at its first endpoint
	legs  []link // at the others
	state state
}

type state uint8

const (
	unlisted state = iota // holds nothing yet, or no more
	listed                // a candidate
	claimed               // an eviction has it
	dead                  // settled, or gone
)

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

// keep is how many empty bands or sets stay beside the others.
const keep = 16

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
	at := b.root.prev
	for at != &b.root && at.e.seq > l.e.seq { // only for what is put back
		at = at.prev
	}
	l.band, l.prev, l.next = b, at, at.next
	l.prev.next, l.next.prev = l, l
	s.n++
}

func (l *link) drop() {
	s := l.band.set
	l.prev.next, l.next.prev = l.next, l.prev
	if l.band.empty() {
		s.idle++
		if s.idle > keep+len(s.bands)/2 {
			s.bands = slices.DeleteFunc(s.bands, (*band).empty)
			s.idle = 0
		}
	}
	l.prev, l.next, l.band = nil, nil, nil
	s.n--
}

// appendBelow appends the set's requests below the priority, or all if it is nil, in
// the default order.
func (s *set) appendBelow(cs []candidate, below *int) []candidate {
	for _, b := range s.bands {
		if below != nil && b.priority >= *below {
			break
		}
		for l := b.root.prev; l != &b.root; l = l.prev {
			cs = append(cs, candidate{Victim: Victim{Handle: l.e.h}, e: l.e, seq: l.e.seq, priority: b.priority})
		}
	}
	return cs
}

// setLocked returns the set that a demand for the endpoint chooses from, or nil.
func (v *Evictor) setLocked(endpoint string) *set {
	if endpoint == "" {
		return &v.all
	}
	return v.endpoints[endpoint]
}

func (v *Evictor) listLocked(e *entry, reqs []abort.Request) {
	priority := reqs[0].Priority
	e.state = listed
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
	if v.idle > keep+len(v.endpoints)/2 {
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
	switch e.state {
	case listed:
		v.unlistLocked(e)
		v.n--
	case claimed:
		v.n--
	}
	e.state = dead
}

// putBack lists a claimed entry again, at its old place, as its request is described
// by now.
func (v *Evictor) putBack(e *entry) {
	reqs := e.h.Requests()
	if e.h.Outcome() != abort.Pending {
		v.bury(e) // its server has not noticed yet that the client left
		return
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	if e.state != claimed {
		return
	}
	if len(reqs) == 0 {
		e.state = unlisted
		v.n--
		return
	}
	v.listLocked(e, reqs)
}

func (v *Evictor) claimLocked(e *entry) {
	v.unlistLocked(e)
	e.state = claimed
}

// claimNewest claims up to n requests that d allows, in the default order.
func (v *Evictor) claimNewest(d *Demand, n int) (es []*entry) {
	v.mu.Lock()
	defer v.mu.Unlock()
	s := v.setLocked(d.Endpoint)
	if s == nil {
		return nil
	}
	for i := 0; i < len(s.bands) && s.bands[i].priority < d.Below; {
		b := s.bands[i]
		if b.empty() {
			i++
			continue
		}
		if len(es) == n {
			break
		}
		e := b.root.prev.e
		v.claimLocked(e) // may drop empty bands, this one among them
		es = append(es, e)
		if i >= len(s.bands) || s.bands[i] != b {
			i = 0
		}
	}
	return es
}

// snapshot returns the requests that d's priority and endpoint allow, in the default order.
func (v *Evictor) snapshot(d *Demand) []candidate {
	v.mu.Lock()
	defer v.mu.Unlock()
	s := v.setLocked(d.Endpoint)
	if s == nil {
		return nil
	}
	return s.appendBelow(make([]candidate, 0, s.n), &d.Below)
}

// claim claims those of a snapshot that have not changed since.
func (v *Evictor) claim(cs []candidate) (es []*entry) {
	v.mu.Lock()
	defer v.mu.Unlock()
	for i := range cs {
		if e := cs[i].e; e.state == listed && e.seq == cs[i].seq {
			v.claimLocked(e)
			es = append(es, e)
		}
	}
	return es
}
