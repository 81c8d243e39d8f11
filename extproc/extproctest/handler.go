package extproctest

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
)

// Handler returns a transport that runs h in process, on a goroutine per request, where a network would run a server: the
// upstream of an [Envoy] in a test. It does what net/http's server does with a handler: it buffers 2 KiB until Flush,
// sets the content length of a short response, sends trailers, cuts the response when h panics, and cancels the request's
// context when the client leaves: when the response's body is closed early or the client's own context ends. Values of
// the client's context do not reach h, as over a network.
func Handler(h http.Handler) http.RoundTripper { return handler{h} }

type handler struct{ http.Handler }

func (t handler) RoundTrip(req *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(context.Background())
	r := req.WithContext(ctx)
	r.Header = req.Header.Clone()
	if r.Header == nil {
		r.Header = make(http.Header)
	}
	r.RequestURI, r.RemoteAddr = req.URL.RequestURI(), "127.0.0.1:0"
	r.URL = &url.URL{Path: req.URL.Path, RawPath: req.URL.RawPath, RawQuery: req.URL.RawQuery}
	r.Proto, r.ProtoMajor, r.ProtoMinor = "HTTP/1.1", 1, 1
	if r.Host == "" {
		r.Host = req.URL.Host
	}
	if r.Body == nil {
		r.Body = http.NoBody
	}

	res := &http.Response{Proto: r.Proto, ProtoMajor: 1, ProtoMinor: 1, Request: req}
	w := &responseWriter{ctx: ctx, header: make(http.Header), head: make(chan struct{}), res: res}
	w.body = newBody(cancel)
	w.body.trailer = &res.Trailer
	res.Body = w.body
	stop := context.AfterFunc(req.Context(), func() {
		w.body.finish(req.Context().Err(), nil) // before h learns of it, whose return would make a normal end
		cancel()
	})
	go func() { // ends when h returns
		defer cancel()
		defer stop()
		defer r.Body.Close()
		defer func() {
			if recover() != nil {
				w.body.finish(io.ErrUnexpectedEOF, nil)
			}
		}()
		t.ServeHTTP(w, r)
		w.close()
	}()
	select {
	case <-w.head:
	case <-w.body.over:
	}
	select {
	case <-w.head: // an empty response is over at once
		if req.Context().Err() == nil {
			return res, nil
		}
		return nil, noResponse(req.Context().Err())
	default:
		return nil, noResponse(w.body.final)
	}
}

func noResponse(err error) error {
	return fmt.Errorf("extproctest: no response from the handler: %w", err)
}

// responseWriter is the handler's end of a response.
type responseWriter struct {
	ctx    context.Context
	header http.Header // the handler's
	code   int         // 0 before WriteHeader
	sent   http.Header // header at WriteHeader
	buf    []byte
	begun  bool          // head is closed
	head   chan struct{} // closed when res is complete but for its body
	res    *http.Response
	body   *body
}

func (w *responseWriter) Header() http.Header { return w.header }

func (w *responseWriter) WriteHeader(code int) {
	if w.code == 0 && code >= 200 {
		w.code, w.sent = code, w.header.Clone()
	}
}

func (w *responseWriter) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	if !bodyAllowed("", w.code) {
		return 0, http.ErrBodyNotAllowed
	}
	if w.buf = append(w.buf, p...); len(w.buf) >= 2<<10 {
		if err := w.flush(-1); err != nil {
			return 0, err
		}
	}
	return len(p), nil
}

func (w *responseWriter) Flush() {
	w.WriteHeader(http.StatusOK)
	w.flush(-1)
}

func (w *responseWriter) flush(length int) error {
	w.begin(length)
	if len(w.buf) == 0 || w.res.Request.Method == http.MethodHead {
		w.buf = nil
		return nil
	}
	select {
	case w.body.pieces <- w.buf:
		w.buf = nil
		return nil
	case <-w.body.closed:
		return errors.New("extproctest: the client has closed the response")
	case <-w.ctx.Done():
		return w.ctx.Err()
	}
}

// begin releases the response's head, once. length is that of the whole body, -1 if it is not known.
func (w *responseWriter) begin(length int) {
	if w.begun {
		return
	}
	w.begun = true
	res := w.res
	res.StatusCode, res.Status = w.code, fmt.Sprintf("%03d %s", w.code, http.StatusText(w.code))
	res.Header, res.ContentLength = w.sent, int64(length)
	for name := range strings.SplitSeq(strings.Join(w.sent["Trailer"], ","), ",") {
		if name = http.CanonicalHeaderKey(strings.TrimSpace(name)); name != "" {
			if res.Trailer == nil {
				res.Trailer = make(http.Header)
			}
			res.Trailer[name] = nil
		}
	}
	for name := range w.sent {
		if name == "Trailer" || strings.HasPrefix(name, http.TrailerPrefix) {
			delete(w.sent, name)
		}
	}
	if n, err := strconv.ParseInt(w.sent.Get("Content-Length"), 10, 64); err == nil {
		res.ContentLength = n
	} else if length >= 0 {
		w.sent.Set("Content-Length", strconv.Itoa(length))
	}
	if _, ok := w.sent["Content-Type"]; !ok && len(w.buf) > 0 {
		w.sent.Set("Content-Type", http.DetectContentType(w.buf))
	}
	close(w.head)
}

// close ends the response when the handler has returned.
func (w *responseWriter) close() {
	w.WriteHeader(http.StatusOK)
	length := -1
	if bodyAllowed("", w.code) && w.sent["Trailer"] == nil {
		length = len(w.buf)
	}
	w.flush(length)
	trailer := make(http.Header)
	for name, v := range w.header {
		key, prefixed := strings.CutPrefix(name, http.TrailerPrefix)
		if _, announced := w.res.Trailer[name]; announced || prefixed {
			trailer[http.CanonicalHeaderKey(key)] = v
		}
	}
	w.body.finish(io.EOF, trailer)
}

func bodyAllowed(method string, code int) bool {
	return method != http.MethodHead && code != http.StatusNoContent && code != http.StatusNotModified
}
