package policy

import (
	"math"
	"slices"
	"time"
)

// breaker says where evictions are pointless.
type breaker struct {
	openUntil time.Duration
	wedges    []time.Duration // of the last minute
	noEffect  int             // evictions in a row
}

func (b *breaker) open(now time.Duration) bool { return now < b.openUntil }

// wedge books that an aborted request's stream did not end.
func (b *breaker) wedge(now time.Duration) {
	b.wedges = slices.DeleteFunc(b.wedges, func(t time.Duration) bool { return now-t > breakWindow })
	if b.wedges = append(b.wedges, now); len(b.wedges) >= breakAt {
		b.trip(now)
	}
}

// effect books whether an eviction was seen to free something.
func (b *breaker) effect(now time.Duration, seen bool) {
	if seen {
		b.noEffect = 0
	} else if b.noEffect++; b.noEffect >= breakAt {
		b.trip(now)
	}
}

func (b *breaker) trip(now time.Duration) {
	b.openUntil = now + breakFor
	b.wedges, b.noEffect = b.wedges[:0], 0
}

// budget bounds the work that evictions destroy, in ms of engine time.
type budget struct {
	left  float64 // never negative
	since time.Duration
}

// fill adds a share of the time that endpoints had since.
func (b *budget) fill(now time.Duration, endpoints int) {
	b.left = min(b.left+budgetShare*ms(now-b.since)*float64(endpoints), budgetBurst*float64(endpoints))
	b.since = now
}

// relief is how long it takes from an abort until the capacity is back.
type relief struct {
	lag    time.Duration // from the stream's end until the engine has freed it: d_abort of the algorithm
	mean   time.Duration // from the abort until the capacity was due
	recent [64]time.Duration
	n      int
	p95    time.Duration
}

const (
	firstLag = 50 * time.Millisecond
	firstEnd = 25 * time.Millisecond // from an abort to the stream's end, before any was seen
	minLag   = 5 * time.Millisecond
	maxLag   = time.Second
)

// learnLag books that one sample did not show the fall, from after a stream's end or before it, and
// that the next one did, to after it. They know no more than that it was between them.
func (l *relief) learnLag(from, to time.Duration) {
	d := min(max(l.lag, from), to)
	l.lag += (min(max(d, minLag), maxLag) - l.lag) / 4
}

// book keeps how long one relief took.
func (l *relief) book(d time.Duration) {
	l.recent[l.n%len(l.recent)] = d
	l.n++
	buf := l.recent
	s := buf[:min(l.n, len(buf))]
	slices.Sort(s)
	l.p95 = s[min(len(s)-1, int(math.Ceil(0.95*float64(len(s)))))]
	l.mean += (d - l.mean) / 8
}

// overdue is the age at which an abort whose stream has not ended is not counted on. Envoy takes
// 3 ms at the 99th percentile; a busy machine stalls for longer than that, and whoever takes a
// stall for an abort that came to nothing evicts one too many.
func (l *relief) overdue() time.Duration {
	return min(max(4*(l.mean-l.lag), 75*time.Millisecond), wedgedAfter)
}

// history is how long answers became, of the last ones that were complete.
type history struct {
	recent [500]int64
	n      int
	sorted []int64
	suffix []float64 // sums of sorted from each place on
	tail   [256]float64
	dirty  bool
}

// historyStep is how many tokens apart history.tail looks.
const historyStep = 64

func (h *history) add(tokens int64) {
	oldest := &h.recent[h.n%len(h.recent)]
	if h.n >= len(h.recent) {
		i, _ := slices.BinarySearch(h.sorted, *oldest)
		h.sorted = slices.Delete(h.sorted, i, i+1)
	}
	i, _ := slices.BinarySearch(h.sorted, tokens)
	h.sorted = slices.Insert(h.sorted, i, tokens)
	*oldest = tokens
	h.n++
	h.dirty = true
}

func (h *history) index() {
	if !h.dirty {
		return
	}
	h.dirty = false
	h.suffix = slices.Grow(h.suffix[:0], len(h.sorted)+1)[:len(h.sorted)+1]
	h.suffix[len(h.sorted)] = 0
	for i := len(h.sorted) - 1; i >= 0; i-- {
		h.suffix[i] = h.suffix[i+1] + float64(h.sorted[i])
	}
	for i := range h.tail {
		h.tail[i] = h.tailAt(int64(i*historyStep + historyStep/2))
	}
}

// mean is how long an answer becomes.
func (h *history) mean() float64 {
	h.index()
	if len(h.sorted) < 20 {
		return 200
	}
	return h.suffix[0] / float64(len(h.sorted))
}

// remaining is how much longer an answer becomes that has got so long. The caller has called
// index.
func (h *history) remaining(generated int64) float64 {
	if i := generated / historyStep; i < int64(len(h.tail)) && len(h.sorted) > 0 {
		return h.tail[i]
	}
	return unknownTail
}

// unknownTail is how much longer an answer becomes if next to none was as long before.
const unknownTail = 100

func (h *history) tailAt(generated int64) float64 {
	i, _ := slices.BinarySearch(h.sorted, generated+1)
	if n := len(h.sorted) - i; n >= 5 {
		return h.suffix[i]/float64(n) - float64(generated)
	}
	return unknownTail
}
