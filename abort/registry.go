package abort

import (
	"crypto/sha256"
	"encoding/hex"
	"iter"
	"strings"
	"sync"
)

// A Registry finds requests in flight by the id that came with them: for an admin
// API, or for a client's own cancellation. The zero Registry is empty and ready. It
// is safe for concurrent use.
//
// Ids are labels. Several requests may carry one id, and Lookup and Abort mean all
// of them; make sure that whoever may name an id may end every request that carries
// it. A request with an empty id is listed by All, but no id finds it: an
// empty argument must never mean everybody.
type Registry struct {
	mu  sync.Mutex
	ids map[string]*registration // the newest of each id; nil while empty, so that its memory is given back
	n   int
}

// registration is one handle under one id. Registry.mu guards its links.
type registration struct {
	r          *Registry
	id         string
	h          *Handle
	prev, next *registration // the circle of those with the same id
	dead       bool
}

type registrationKey struct {
	r  *Registry
	id string
}

const maxID = 256

// label returns id as the registry keeps it: one of up to 256 bytes as it is, a
// longer one as its first bytes and its SHA-256. It is its own label.
func label(id string) string {
	if len(id) <= maxID {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return id[:maxID-2*sha256.Size-1] + "~" + hex.EncodeToString(sum[:])
}

// Add registers h under id until it settles. Adding it again under the same id
// changes nothing; under another, it is found by both.
func (r *Registry) Add(id string, h *Handle) {
	if h.none() {
		return
	}
	n := &registration{r: r, id: strings.Clone(label(id)), h: h}
	// Attached before it is linked: if h settles in between, Settled marks n dead first.
	if h.Attach(registrationKey{r, n.id}, n) != nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if n.dead {
		return
	}
	if r.ids == nil {
		r.ids = make(map[string]*registration)
	}
	n.prev, n.next = n, n
	if old := r.ids[n.id]; old != nil {
		n.prev, n.next = old.prev, old
		n.prev.next, n.next.prev = n, n
	}
	r.ids[n.id] = n
	r.n++
}

// Settled implements [Settler].
func (n *registration) Settled(Outcome) {
	r := n.r
	r.mu.Lock()
	defer r.mu.Unlock()
	n.dead = true
	if n.next == nil {
		return
	}
	if n.next == n {
		delete(r.ids, n.id)
	} else {
		n.prev.next, n.next.prev = n.next, n.prev
		if r.ids[n.id] == n {
			r.ids[n.id] = n.next
		}
	}
	r.n--
	if r.n == 0 {
		r.ids = nil
	}
}

// Lookup returns the requests in flight that carry id, the newest first.
func (r *Registry) Lookup(id string) []*Handle {
	if id == "" {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	var hs []*Handle
	if first := r.ids[label(id)]; first != nil {
		hs = append(hs, first.h)
		for n := first.next; n != first; n = n.next {
			hs = append(hs, n.h)
		}
	}
	return hs
}

// All returns an iterator over the requests in flight when it starts, in no order,
// each with its id. An id of more than 256 bytes is shortened; Lookup and Abort
// take it in either form.
func (r *Registry) All() iter.Seq2[string, *Handle] {
	return func(yield func(string, *Handle) bool) {
		r.mu.Lock()
		all := make([]*registration, 0, r.n)
		for _, first := range r.ids {
			all = append(all, first)
			for n := first.next; n != first; n = n.next {
				all = append(all, n)
			}
		}
		r.mu.Unlock()
		for _, n := range all {
			if !yield(n.id, n.h) {
				return
			}
		}
	}
}

// Len returns how many registrations there are.
func (r *Registry) Len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.n
}

// Abort aborts every request in flight that carries id and returns how many it
// ended: more than one if the id repeats, none if there is no such request or
// something else had ended it.
func (r *Registry) Abort(id string, why Reason) (aborted int) {
	for _, h := range r.Lookup(id) {
		if h.Abort(why) {
			aborted++
		}
	}
	return aborted
}
