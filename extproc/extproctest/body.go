package extproctest

import (
	"bytes"
	"context"
	"io"
	"maps"
	"net/http"
	"sync"
)

// A body is a message body on its way, piece by piece, from one goroutine that makes it to one that reads it. Nothing is
// buffered between them, so a slow reader holds up the writer.
type body struct {
	pieces  chan []byte
	over    chan struct{} // closed by finish; final and last may be read then
	final   error
	last    http.Header
	closed  chan struct{} // closed by Close
	finish1 sync.Once
	close1  sync.Once
	onClose func() // called by the first Close, before the writer sees it

	rest    []byte       // the reader's
	trailer *http.Header // where the reader puts the trailers at io.EOF
}

func newBody(onClose func()) *body {
	return &body{pieces: make(chan []byte), over: make(chan struct{}), closed: make(chan struct{}), onClose: onClose}
}

// finish says what Read returns behind the pieces: io.EOF or why the body is cut short. The first call counts.
func (b *body) finish(err error, trailer http.Header) {
	b.finish1.Do(func() {
		b.final, b.last = err, trailer
		close(b.over)
	})
}

func (b *body) Read(p []byte) (int, error) {
	for len(b.rest) == 0 {
		select {
		case <-b.closed:
			return 0, http.ErrBodyReadAfterClose
		case b.rest = <-b.pieces:
		case <-b.over:
			if b.final == io.EOF && len(b.last) > 0 {
				if *b.trailer == nil {
					*b.trailer = make(http.Header)
				}
				maps.Copy(*b.trailer, b.last)
				b.last = nil
			}
			return 0, b.final
		}
	}
	n := copy(p, b.rest)
	b.rest = b.rest[n:]
	return n, nil
}

func (b *body) Close() error {
	b.close1.Do(func() {
		if b.onClose != nil {
			b.onClose()
		}
		close(b.closed)
	})
	return nil
}

// A sink is the writing end of a body for an event loop, which must not block: what it writes is queued, and the loop
// offers next's piece on next's channel whenever it waits.
type sink struct {
	*body
	queue  [][]byte
	queued int   // bytes in queue
	taken  int64 // bytes the reader has had
	ending bool  // finish when the queue is empty
	err    error
	last   http.Header
}

func (s *sink) write(b []byte) {
	if len(b) > 0 && !s.ending {
		s.queue, s.queued = append(s.queue, b), s.queued+len(b)
	}
}

// end finishes the body behind what is queued.
func (s *sink) end(err error, trailer http.Header) {
	if !s.ending {
		s.ending, s.err, s.last = true, err, trailer
		s.settle()
	}
}

// abort finishes the body now; what is queued is lost.
func (s *sink) abort(err error) {
	s.queue, s.queued, s.ending = nil, 0, true
	s.finish(err, nil)
}

func (s *sink) settle() {
	if s.ending && len(s.queue) == 0 {
		s.finish(s.err, s.last)
	}
}

func (s *sink) next() (chan<- []byte, []byte) {
	if len(s.queue) == 0 {
		return nil, nil
	}
	return s.pieces, s.queue[0]
}

func (s *sink) pop() {
	n := len(s.queue[0])
	s.queue, s.queued, s.taken = s.queue[1:], s.queued-n, s.taken+int64(n)
	s.settle()
}

func (s *sink) done() bool {
	select {
	case <-s.over:
		return true
	default:
		return false
	}
}

// A chunk is what one Read of a source returned.
type chunk struct {
	data    []byte
	end     bool
	trailer http.Header // at the end, nil if there are none
	err     error       // the source broke
}

// pump reads r to its end into ch, or until ctx ends. It runs on a goroutine of its own.
func pump(ctx context.Context, r io.Reader, trailer *http.Header, ch chan<- chunk) {
	buf := make([]byte, 32<<10)
	for {
		n, err := r.Read(buf)
		if n == 0 && err == nil {
			continue
		}
		c := chunk{data: bytes.Clone(buf[:n]), end: err == io.EOF}
		if err != nil && err != io.EOF {
			c.err = err
		}
		if c.end {
			for k, v := range *trailer {
				if len(v) > 0 {
					if c.trailer == nil {
						c.trailer = make(http.Header)
					}
					c.trailer[k] = v
				}
			}
		}
		select {
		case ch <- c:
		case <-ctx.Done():
			return
		}
		if err != nil {
			return
		}
	}
}
