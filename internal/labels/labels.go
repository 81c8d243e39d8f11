// Package labels bounds how many values a metric's label has.
package labels

import (
	"slices"
	"sync"
)

// Most is how many values of its own a label has.
const Most = 16

// Other stands for all values beyond those.
const Other = "other"

// A Set is the values of a label: the first that come keep theirs. The zero Set is ready.
// All methods are safe for concurrent use.
type Set struct {
	mu    sync.Mutex // guards what follows
	known []string
	more  bool // there were others
}

// Of returns the value for v: v itself, or Other.
func (s *Set) Of(v string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case slices.Contains(s.known, v):
		return v
	case len(s.known) == Most:
		s.more = true
		return Other
	}
	s.known = append(s.known, v)
	return v
}

// All returns the values so far.
func (s *Set) All() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	all := slices.Clip(s.known)
	if s.more {
		all = append(all, Other)
	}
	return all
}
