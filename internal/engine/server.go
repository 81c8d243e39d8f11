package engine

import (
	"errors"
	"sync"
	"time"
)

// A Server runs a Core in real time behind the API of OpenAI and the metrics of vLLM:
//
//	POST /v1/chat/completions, /v1/completions   streamed (SSE) or not
//	GET  /v1/models, /health, /metrics
//
// Prompt tokens are the bytes of the text divided by four, rounded up for each message, at least one; a prompt that is
// an array of token ids has as many as the array. A request must fit the pool with the most it may generate. Token i of
// every answer is the same three-letter word with a space behind it. With max_tokens (or max_completion_tokens) an
// answer has exactly that many tokens and finish_reason "length", as if the client had set ignore_eos; else it has
// Config.AnswerTokens and "stop". A header X-Request-Id is repeated in the answer's id and in End.
//
// A request whose context ends (the client has left) is aborted in the Core. Handlers wait for tokens on their own
// goroutine, net/http's, and write there, so that a client that doesn't read delays nobody.
type Server struct {
	cfg   Config
	start time.Time

	wake chan struct{} // capacity 1: there is something new for run; from handlers to run
	stop chan struct{} // closed by Close, once
	done chan struct{} // closed by run when it returns
	once sync.Once

	mu     sync.Mutex // guards what follows, the fields of the core's sequences, and call.canceled
	core   *Core
	closed bool
	calls  int64            // accepted so far
	ends   map[string]int64 // by reason
}

// A call is one request, the Tag of its sequence.
type call struct {
	id       string
	limited  bool          // by the client or by the pool: it ends with "length"
	wake     chan struct{} // capacity 1: the sequence has got on; from run to the handler
	canceled time.Time
}

// An End tells how a request ended. Config.OnEnd gets it after the engine has freed what the request held (or never
// will: AbortLeak), before the client gets the last token. It is called without locks on the goroutine of the step loop,
// so it must return soon and not call Close.
type End struct {
	ID           string // X-Request-Id as the client sent it: may be empty or repeated
	Stream       bool
	Reason       string // stop, length or abort
	PromptTokens int
	Tokens       int       // generated
	Canceled     time.Time // when the server saw that the client had left; zero if it did not
	At           time.Time // the step boundary
}

// NewServer returns a running Server; Close ends it. It panics if c makes no sense.
func NewServer(c Config) *Server {
	core := New(c)
	s := &Server{
		cfg: core.cfg, core: core, start: time.Now(),
		wake: make(chan struct{}, 1), stop: make(chan struct{}), done: make(chan struct{}),
		ends: make(map[string]int64),
	}
	go s.run()
	return s
}

// Close ends the engine as a crash would: what is in flight ends with reason abort, streams break off, and everything
// else, then and later, is answered with 503. It returns when the last OnEnd has. It does not wait for handlers.
func (s *Server) Close() {
	s.once.Do(func() { close(s.stop) })
	<-s.done
}

// Stats returns the Core's, as /metrics shows them.
func (s *Server) Stats() Stats {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.core.Stats()
}

// run is the step loop and the only caller of core.Step. NewServer starts it, Close ends it; it sleeps without lock.
func (s *Server) run() {
	defer close(s.done)
	timer := time.NewTimer(0)
	defer timer.Stop()
	var ends []End // its buffer
	for {
		s.mu.Lock()
		now := time.Since(s.start)
		step := s.core.Step(now)
		ends = s.bookLocked(ends[:0], step.Ended)
		s.mu.Unlock()
		s.deliver(ends, step.Tokens, step.Ended)

		var tick <-chan time.Time
		if !step.Idle {
			timer.Reset(step.Next - time.Since(s.start))
			tick = timer.C
		}
		select {
		case <-tick:
		case <-s.wake: // early is fine: Step knows
		case <-s.stop:
			s.mu.Lock()
			s.closed = true
			ended := s.core.Reset(time.Since(s.start))
			ends = s.bookLocked(ends[:0], ended)
			s.mu.Unlock()
			s.deliver(ends, nil, ended)
			return
		}
	}
}

func (s *Server) bookLocked(ends []End, ended []*Sequence) []End {
	for _, q := range ended {
		c := q.Tag.(*call)
		e := End{
			ID: c.id, Stream: q.Stream, Reason: q.reason(), PromptTokens: q.Prompt, Tokens: q.Generated,
			Canceled: c.canceled, At: time.Now(),
		}
		s.ends[e.Reason]++
		ends = append(ends, e)
	}
	return ends
}

// reason is the finish_reason of a sequence that has ended.
func (s *Sequence) reason() string {
	switch {
	case s.State == Aborted:
		return "abort"
	case s.Tag.(*call).limited:
		return "length"
	default:
		return "stop"
	}
}

// deliver tells the observer and the handlers. A handler that was told already and hasn't looked yet will see all there
// is.
func (s *Server) deliver(ends []End, tokens, ended []*Sequence) {
	if s.cfg.OnEnd != nil {
		for _, e := range ends {
			s.cfg.OnEnd(e)
		}
	}
	for _, q := range tokens {
		if q.Stream {
			poke(q.Tag.(*call).wake)
		}
	}
	for _, q := range ended {
		poke(q.Tag.(*call).wake)
	}
}

func poke(c chan struct{}) {
	select {
	case c <- struct{}{}:
	default:
	}
}

var errClosed = errors.New("engine: server closed")

// add hands a request to the core. It fails with errClosed or like Core.Add.
func (s *Server) add(r Request) (q *Sequence, number int64, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, 0, errClosed
	}
	if q, err = s.core.Add(time.Since(s.start), r); err != nil {
		return nil, 0, err
	}
	s.calls++
	poke(s.wake)
	return q, s.calls, nil
}

// cancel aborts a sequence whose client has left.
func (s *Server) cancel(q *Sequence) {
	s.mu.Lock()
	defer s.mu.Unlock()
	q.Tag.(*call).canceled = time.Now()
	s.core.Abort(time.Since(s.start), q)
	poke(s.wake)
}

// progress returns how far a sequence is.
func (s *Server) progress(q *Sequence) (generated int, state State) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return q.Generated, q.State
}
